"""`OptimizersStudy`: the stable learning rates of several update rules side by side, on one workload (F2.3).

Each rule gets a sweep of its own; a round holds what every one of them asks for next, and all of it trains as lanes.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from workbench.checks import check_fields, check_integer
from workbench.config import OPTIMIZERS
from workbench.curves.judged import trials_with
from workbench.errors import ConfigError, UnknownNameError, nearest
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.lr_sweep.collect import measure_critical_lr
from workbench.topics.lr_sweep.study import LRSweep, TrialRequest, run_round, seeded
from workbench.topics.optimizers.constants import shorter, stale_moments
from workbench.topics.optimizers.diagnose import ONE_FORM, matters
from workbench.topics.optimizers.rule_forms import explain_rule
from workbench.topics.optimizers.rule_ranges import RuleRange, ends_next, read_ranges, rival, rule_view
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model

EXPLAINED_STEPS = 2000  # steps of the baseline's trace on which the two forms of a rule are compared, at most


def _sweep() -> LRSweep:
    return LRSweep(tolerance=0.1, refinements=0, full_batch_refinements=2)


@dataclass(frozen=True, kw_only=True)
class OptimizersStudy(Study):
    """A learning-rate range for each update rule, the best of them over seeds, and twins that tell causes apart.

    Everything else is the workload's own. The baseline's rule is always one of them, and the first; its trials that are there count.

    Attributes:
        optimizers: names of the rules to try.
        lrs: exactly these, for every rule, or a mapping from a rule to its own; None finds each rule's range.
        seeds: trials of the best other rule and of the baseline's, at the lr of their best checkpoint; the first one is that
            under which they were chosen and does not count, so 1 leaves the question to a single pair of runs.
        steps: length of a trial; None is the baseline's.
        end_ratio: how far apart the last lr that trains and the next one, which does not, may stay (rule of thumb).
        memory_factor: where a rise began with a second moment out of date, the same is trained with a memory this many times
            shorter (rule of thumb: 0.999 becomes 0.99).
        sweep: how to search; its `lrs` and `steps` are those above.
    """

    stem: ClassVar[str] = "optimizers"

    optimizers: Sequence[str] = OPTIMIZERS
    lrs: Mapping[str, Sequence[float]] | Sequence[float] | None = None
    seeds: int = 4
    steps: int | None = None
    end_ratio: float = 2.0
    memory_factor: float = 10.0
    sweep: LRSweep = field(default_factory=_sweep)

    def __post_init__(self) -> None:
        """Check every field."""
        if isinstance(self.optimizers, str) or not len(self.optimizers):
            raise ConfigError(f"optimizers={self.optimizers!r} must be a list of rules, such as ['momentum', 'adam'].")
        for name in (*self.optimizers, *(self.lrs if isinstance(self.lrs, Mapping) else ())):
            if name not in OPTIMIZERS:
                raise UnknownNameError(f"{name!r} is not an update rule.{nearest(str(name), OPTIMIZERS)}")
        check_integer("seeds", self.seeds, hint="; with 1 or 2 chance is not measured")
        check_fields(self, "end_ratio memory_factor", lambda v: 1 < v < math.inf, "a finite number above 1")
        if self.sweep.lrs is not None or self.sweep.steps is not None:
            raise ConfigError("sweep.lrs and sweep.steps must be None: give lrs=... and steps=... to the study itself.")
        for name, lrs in self.lrs.items() if isinstance(self.lrs, Mapping) else [("", self.lrs)]:
            LRSweep(lrs=lrs)  # raises what is wrong with them
            if isinstance(self.lrs, Mapping) and name not in self.optimizers:
                raise ConfigError(
                    f"lrs has learning rates for {name!r}, which is not one of optimizers={list(self.optimizers)}."
                )
        if isinstance(self.lrs, Mapping) and (missing := [name for name in self.optimizers if name not in self.lrs]):
            raise ConfigError(
                f"lrs has no learning rates for {', '.join(missing)}: give some, or leave the rule out of optimizers."
            )

    def extend(self, session: Session) -> None:
        """Run the study's trials inside a study that is already open."""
        if session.workload.step is not None:
            raise ConfigError(
                f"workload {session.workload.name!r} has a step of its own, whose optimizers cannot be exchanged for rules by name: "
                "diagnose it with each factory, optimizer=lambda model, lr: ..., and compare the records."
            )
        _Race(self, session).run()


class _Race:
    """The sweeps of all rules, in one study."""

    def __init__(self, study: OptimizersStudy, session: Session) -> None:
        self.study, self.session = study, session
        own = session.config
        others = [own.replace(optimizer=name) for name in study.optimizers if name != own.optimizer]
        self.configs = {str(config.to_dict()["optimizer"]): config for config in (own, *others)}
        self.own = next(iter(self.configs))
        self.record = session.record
        self.noted: dict[str, Any] = dict(self.record.facts.get("optimizers") or {})

    def run(self) -> None:
        """Search all ranges, then ask what tells causes and chance apart."""
        self._search()
        if self.study.lrs is None:
            self._ends()
        ranges = read_ranges(self.record)
        self._note(forms=self._forms())
        self._train([*self._fresh(ranges), *self._twins(ranges), *self._memories(ranges)])

    def _train(self, requests: Sequence[TrialRequest]) -> None:
        run_round(self.session, requests)
        self.record = self.session.record

    def _note(self, **values: Any) -> None:
        self.noted |= values
        self.session.facts(optimizers=self.noted)

    def _search(self) -> None:
        """Take a round of each sweep, train them together, and go on until none asks for more."""
        searches = {name: self._rounds(name) for name in self.configs}
        extra_trials = [TrialRequest(Role.BASELINE, self.session.config)]
        while searches:
            requests = {name: found for name, rounds in searches.items() if (found := next(rounds, None)) is not None}
            searches = {name: searches[name] for name in requests}
            self._train([*extra_trials, *(self._renamed(one) for found in requests.values() for one in found)])
            extra_trials = []

    def _rounds(self, name: str) -> Iterator[list[TrialRequest]]:
        lrs = self.study.lrs.get(name) if isinstance(self.study.lrs, Mapping) else self.study.lrs
        if lrs is None and isinstance(self.study.lrs, Mapping):  # its rule is a function of the user's own
            raise ConfigError(f"lrs has no learning rates for {name}, the workload's own optimizer: give some.")
        read = lambda: rule_view(self.record, name)  # noqa: E731 - the record is another one after each round
        sweep = dataclasses.replace(self.study.sweep, lrs=lrs)
        return sweep.rounds(self.configs[name], read, critical=partial(self._critical, name))

    def _critical(self, name: str) -> float:
        """Return where along a rule's first update the loss stops falling: the scale of its learning rates."""
        known: dict[str, float] = dict(self.noted.get("critical") or {})
        if name not in known:
            config = self.configs[name]
            found = measure_critical_lr(self.session.workload, config, self.session.device).value
            known[name] = config.peak_lr if found is None else found
            self._note(critical=known)
        return known[name]

    def _renamed(self, request: TrialRequest) -> TrialRequest:
        """Give a trial of another rule its stage; those of the baseline's are points of its own sweep, whoever reads them."""
        if request.config.optimizer == self.session.config.optimizer:
            return request
        return TrialRequest(Role.OPTIMIZERS_RANGE if request.role == Role.LR_RANGE else Role.OPTIMIZERS, request.config)

    def _ends(self) -> None:
        """Ask for lrs until the smallest and the largest that train are known for each rule."""
        reach = 10 ** (self.study.sweep.decades / 2)
        while True:
            requests = [
                self._renamed(TrialRequest(Role.LR_SWEEP, config))
                for name, found in read_ranges(self.record).items()
                if name in self.configs
                for critical in [self._critical(name)]
                for lr in ends_next(
                    found, ratio=self.study.end_ratio, lowest=critical / reach, highest=critical * reach
                )
                for config in seeded(self.configs[name], lr, self.study.sweep.seeds)
            ]
            if not requests:
                return
            self._train(requests)

    def _fresh(self, ranges: Mapping[str, RuleRange]) -> list[TrialRequest]:
        """Return the best other rule and the baseline's under further seeds, where the other one looks better."""
        own, other = ranges.get(self.own), rival(ranges)
        if own is None or other is None or own.selected is None or other.selected is None:
            return []
        if own.sign * other.selected >= own.sign * own.selected:
            return []
        return [
            TrialRequest(Role.OPTIMIZERS_SEEDS, config)
            for found in (own, other)
            for config in seeded(self.configs[found.optimizer], found.selected_lr or 0.0, self.study.seeds)[1:]
        ]

    def _twins(self, ranges: Mapping[str, RuleRange]) -> list[TrialRequest]:
        """Return the other form of every rule that has two."""
        best = [
            self.configs[n].replace(peak_lr=r.best_lr) for n, r in ranges.items() if n in self.configs and r.best_lr
        ]
        told = [*best, *([self.session.config] if self.session.config not in best else [])]
        two = [c for c in told if not callable(c.optimizer) and c.optimizer not in ONE_FORM]
        twins = [c.replace(rules="torch" if c.rules == "playbook" else "playbook") for c in two]
        return [TrialRequest(Role.OPTIMIZERS_TWIN, config) for config in twins]

    def _memories(self, ranges: Mapping[str, RuleRange]) -> list[TrialRequest]:
        """Return the same run with a shorter memory, where a rise began with a second moment out of date."""
        found = []
        for hit in stale_moments(self.record):
            curve = hit.trial.curve
            config = self.configs.get(str(curve.config["optimizer"]))
            value = shorter(hit.memory, self.study.memory_factor)
            if config is not None and value >= 0 and matters(hit, ranges):
                seeds = {name: int(curve.config[name]) for name in ("shared_seed", "per_host_seed")}
                found.append(config.replace(peak_lr=curve.lr, **{hit.field: value}, **seeds))
        return [TrialRequest(Role.OPTIMIZERS_TWIN, config) for config in found]

    def _forms(self) -> dict[str, Any]:
        """Return where the two forms of each rule part, for a typical parameter of the baseline's run."""
        own, steps = trials_with(self.record, self.session.config.to_dict()), self.record.steps
        rows = steps[steps["trial"] == own[0]].sort_values("step")
        rows = rows[np.isfinite(rows["grad_norm"].to_numpy(dtype=np.float64))][:EXPLAINED_STEPS]
        if not len(rows):
            return {}
        with isolated_rng():
            model = build_model(self.session.workload, self.session.config, self.session.device)
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        gradients = rows["grad_norm"].to_numpy(dtype=np.float64) / math.sqrt(count)
        lrs = rows["lr"].to_numpy(dtype=np.float64)
        return {
            name: explain_rule(config, lrs=lrs, gradients=gradients).to_dict()
            for name, config in self.configs.items()
            if not callable(config.optimizer) and config.optimizer not in ONE_FORM
        }
