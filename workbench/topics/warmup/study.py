"""`WarmupStudy`: the shortest warmup that opens learning rates far above the one that is unstable without it (F3)."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from workbench.checks import check_fields, check_integer, check_number
from workbench.config import TrainConfig
from workbench.curves.judged import judged
from workbench.errors import ConfigError
from workbench.record.roles import Role
from workbench.schedules import cap_steps, prepend_warmup
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.lr_sweep.study import TrialRequest, run_round
from workbench.topics.stability.study import InstabilityStudy
from workbench.topics.warmup.diagnose import NextRun, WarmupSearch, next_run, read_searches, warmup_signs

MIN_TRIAL_STEPS = 10  # A curve of fewer steps cannot be judged


@dataclass(frozen=True, kw_only=True)
class WarmupStudy(Study):
    """Warmup lengths at multiples of the unstable learning rate.

    Short trials find a length, a ramp and twice as many steps after it (F3.7); a run of the full budget has to confirm it.

    Attributes:
        unstable_base_learning_rate: the lr that is unstable without warmup (F3.2); None takes `lr.unstable` of the study, and
            sweeps and looks for the two signs where it is not known. Then it stops where neither sign holds (F3.1).
        multiples: learning rates to open, over the unstable one, in this order; (10.0, 100.0) is the second round (F3.4).
        warmup_steps: lengths to try (F3.9), each prepended to the baseline's schedule; those above the cap are dropped.
        steps: length of a full trial; None is the baseline's.
        cap_frac: longest warmup as a share of the baseline's steps (F3.10).
        post_warmup_ratio: steps of a short trial after the ramp, over those of the ramp (F3.7).
        refine_ratio: how far apart the shortest that passes and the next shorter one may stay (rule of thumb).
        full_runs: full-budget runs at one learning rate, at most (rule of thumb).
        multiple_trials: where no length passes, short trials that look for the largest multiple that does (rule of thumb).
        instability: how to look for the unstable lr and the signs where they are not known.
    """

    stem: ClassVar[str] = "warmup"

    unstable_base_learning_rate: float | None = None
    multiples: Sequence[float] = (10.0,)
    warmup_steps: Sequence[int] = (10, 1000, 10_000, 100_000)
    steps: int | None = None
    cap_frac: float = 0.1
    post_warmup_ratio: float = 2.0
    refine_ratio: float = 2.0
    full_runs: int = 4
    multiple_trials: int = 3
    instability: InstabilityStudy = field(default_factory=InstabilityStudy)

    def __post_init__(self) -> None:
        """Check every field."""
        numbers: dict[str, Any] = {f"multiples[{i}]": m for i, m in enumerate(self.multiples)}
        numbers |= {"cap_frac": self.cap_frac, "post_warmup_ratio": self.post_warmup_ratio}
        if self.unstable_base_learning_rate is not None:
            numbers["unstable_base_learning_rate"] = self.unstable_base_learning_rate
        for name, value in numbers.items():
            check_number(name, value)
        for name in ("multiples", "warmup_steps"):
            if not len(getattr(self, name)):
                raise ConfigError(f"{name}=() must hold at least one; leave it out for the default.")
        check_fields(self, "cap_frac", lambda v: v <= 1, "at most 1: 0.1 is a tenth of the baseline's steps")
        check_fields(self, "refine_ratio", lambda v: v > 1, "above 1: 2.0 leaves a factor of two")
        for name, low in (("full_runs", 2), ("multiple_trials", 0)):
            check_integer(name, getattr(self, name), low=low)
        for i, steps in enumerate(self.warmup_steps):
            check_integer(f"warmup_steps[{i}]", steps)
            if self._trial_steps(steps) < MIN_TRIAL_STEPS:
                raise ConfigError(
                    f"warmup_steps[{i}]={steps!r} gives a trial of {self._trial_steps(steps)} steps, but {MIN_TRIAL_STEPS} are "
                    f"needed to judge one: raise it to {self._least_steps}."
                )

    def extend(self, session: Session) -> None:
        """Run the study's trials inside a study that is already open."""
        cap = max(cap_steps(session.config.total_steps, self.cap_frac) - session.config.warmup_steps, 0)
        fitting = sorted({w for w in self.warmup_steps if w <= cap})
        noted: dict[str, Any] = {
            "source": "record" if self.unstable_base_learning_rate is None else "given",
            "cap": cap, "candidates": fitting, "dropped": sorted({w for w in self.warmup_steps if w > cap}),
            "multiples": [float(m) for m in self.multiples], "unstable_lr": self.unstable_base_learning_rate,
            "stopped": None if fitting else self._too_short(session.config, cap),
        }  # fmt: skip
        if fitting and self.unstable_base_learning_rate is None:
            signs = warmup_signs(session.record)
            if signs.unstable_lr is None or signs.holds is None:
                self.instability.extend(session)
                signs = warmup_signs(session.record)
            noted["unstable_lr"] = signs.unstable_lr
            if signs.unstable_lr is None:
                noted["stopped"] = "no learning rate was found unstable"
            elif signs.holds is False:
                neither = "the best lr is at no harmful edge, and no run far above it rises after a decline"
                noted["stopped"] = f"neither sign calls for a warmup: {neither}"
        session.facts(warmup=noted)
        if noted["stopped"] is None:
            _Tuner(self, session, float(noted["unstable_lr"]), cap, fitting).run()
            learned = judged(session.record).sweep().learned
            session.facts(warmup=noted | {"stopped": None if learned else "no run without a warmup learned anything"})

    def _too_short(self, config: TrainConfig, cap: int) -> str:
        shortest = min(self.warmup_steps)
        own = f" less the {config.warmup_steps:,} that it warms up for already" if config.warmup_steps else ""
        needed = math.ceil((shortest + config.warmup_steps) / self.cap_frac - 1e-9)
        shorter = f"{self._least_steps} to {cap:,}" if cap > self._least_steps else f"{cap:,}"
        or_else = f", or give warmup_steps of {shorter}" if cap >= self._least_steps else ""
        return (
            f"no candidate fits: {self.cap_frac:g} of {config.total_steps:,} steps{own} is {cap:,}, and the shortest candidate "
            f"has {shortest:,}; train for at least {needed:,} steps{or_else}"
        )

    @property
    def _least_steps(self) -> int:
        """The shortest length whose short trial can be judged."""
        return next(w for w in itertools.count(1) if self._trial_steps(w) >= MIN_TRIAL_STEPS)

    def _trial_steps(self, ramp: int) -> int:
        return round(ramp * (1 + self.post_warmup_ratio))

    def short_trial(self, config: TrainConfig, lr: float, warmup_steps: int) -> TrainConfig:
        """Return the short trial of a length: the ramp, prepended to the baseline's, then a constant lr (F3.5).

        It is never shorter than that of the shortest length listed, so that the shortest ones can be told from no warmup.
        """
        ramp = config.warmup_steps + warmup_steps
        total = self._trial_steps(max(ramp, min(self.warmup_steps)))
        steps = {"warmup_steps": ramp, "total_steps": total, "eval_every_steps": total, "checkpoint_every_steps": total}
        return config.replace(peak_lr=lr, schedule="constant", **steps)


@dataclass(frozen=True)
class _Tuner:
    """The search itself, in one study."""

    study: WarmupStudy
    session: Session
    unstable_lr: float
    cap: int
    lengths: Sequence[int]

    def run(self) -> None:
        """Look for the shortest length at each multiple; where there is none, for the largest multiple that has one."""
        config, known = self.session.config, self.session.record.trials
        references = [TrialRequest(Role.BASELINE, config)]
        if not (len(known) and known["stage"].isin(("lr_sweep", "lr_unstable")).any()):
            stable = [self.unstable_lr / 2, self.unstable_lr / 4]
            other = next(lr for lr in stable if not math.isclose(lr, config.peak_lr, rel_tol=1e-9))
            references.append(TrialRequest(Role.LR_SWEEP, config.replace(peak_lr=other)))
        for number, multiple in enumerate(self.study.multiples):
            if self._shortest(multiple, extra_trials=references) is None:
                if number == 0:
                    self._largest_multiple(multiple)
                return
            references = []

    def _shortest(self, multiple: float, *, extra_trials: Sequence[TrialRequest] = ()) -> int | None:
        """Run the rounds of one multiple, the first with the `extra_trials`; return the shortest length that passes."""
        lr = multiple * self.unstable_lr
        run_round(self.session, [*extra_trials, *(self._request(("short", w), lr) for w in self.lengths)])
        if not judged(self.session.record).sweep().learned:
            return None
        answered: set[NextRun] = set()
        while (
            question := next_run(tried := self._search(lr), cap=self.cap, refine_ratio=self.study.refine_ratio)
        ) is not None:
            made = sum(one.full is not None for one in tried.lengths)
            if question in answered or (question[0] == "full" and made >= self.study.full_runs):
                break
            answered.add(question)
            run_round(self.session, [self._request(question, lr)])
        found = self._search(lr).confirmed
        return None if found is None else found.steps

    def _largest_multiple(self, failing: float) -> None:
        """Halve the gap, in the logarithm, between 1 and a multiple that no length opens; what is found must pass in full."""
        passing, high = [1.0], failing
        learned = judged(self.session.record).sweep().learned
        for _ in range(self.study.multiple_trials if failing > 1 and learned else 0):
            middle = math.sqrt(passing[-1] * high)
            lr = middle * self.unstable_lr
            run_round(self.session, [self._request(("short", self.cap), lr)])
            if self._search(lr)[self.cap].short:
                passing.append(middle)
            else:
                high = middle
        for multiple in reversed(passing[1:]):
            lr = multiple * self.unstable_lr
            run_round(self.session, [self._request(("full", self.cap), lr)])
            if self._search(lr)[self.cap].full:
                self._shortest(multiple)
                return

    def _request(self, question: NextRun, lr: float) -> TrialRequest:
        (kind, steps), config = question, self.session.config
        if kind == "short":
            return TrialRequest(Role.WARMUP, self.study.short_trial(config, lr, steps))
        return TrialRequest(Role.WARMUP_FULL, prepend_warmup(config.replace(peak_lr=lr), steps))

    def _search(self, lr: float) -> WarmupSearch:
        found = read_searches(self.session.record, self.unstable_lr)
        same = [search for search in found if math.isclose(search.lr, lr, rel_tol=1e-9)]
        return same[0] if same else WarmupSearch(lr=lr, multiple=lr / self.unstable_lr, lengths=())
