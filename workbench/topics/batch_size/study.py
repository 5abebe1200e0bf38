"""`BatchSizeStudy`: batch sizes side by side, as they are and with learning rate and momentum tuned for each (F6)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch.utils.data import Subset

from workbench.checks import check_fields, check_integer, check_number
from workbench.config import TrainConfig
from workbench.curves.trial_curves import memory_field
from workbench.errors import ConfigError, UsageError
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.batch_size.arms import BatchArm, choosing_seeds, next_points, read_arms
from workbench.topics.batch_size.collect import collect_noise_scale
from workbench.topics.lr_sweep.study import TrialRequest, run_round, seeded
from workbench.train.checkpoint import load_model
from workbench.train.evaluation import evaluate
from workbench.train.example_values import evaluation_batch
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.items import in_its_own_order

Equal = Literal["steps", "examples"]
STAGE, FIXED, FRESH, DECAY = Role.BATCH_SIZE, Role.BATCH_SIZE_FIXED, Role.BATCH_SIZE_SEEDS, Role.BATCH_SIZE_DECAY


@dataclass(frozen=True, kw_only=True)
class BatchSizeStudy(Study):
    """Each batch size with the baseline's settings and with its own, under fresh seeds, at equal steps and at equal examples.

    What a sweep over the batch size alone shows is mostly that the other settings fit one batch size better than another (F6.1). So
    learning rate and momentum are tuned for each, as lanes, before any two are held against each other.

    Attributes:
        batch_sizes: what to try beside the baseline's own; None is a quarter of it and four times it, as far as the training
            data reach.
        equal: what batch sizes have in common: "steps", "examples", or both (F6.7).
        retune: False leaves the tuning out, and the verdict says what such a sweep is worth.
        memories: momentum (or beta1) to try with each; None is the baseline's own and averages over three times and a third
            as many steps; the rules without one are tuned by their lr alone.
        lr_ratio, reach: step of the grid of learning rates (rule of thumb), which is extended until the best lies inside, and how many
            steps at most to each side of the baseline's lr.
        finalists: how many of the best settings of each arm are trained under all choosing seeds (rule of thumb).
        choosing_seeds: the baseline's own and those after it, by which settings are chosen: the best of many under one seed
            is partly luck (rule of thumb).
        seeds: fresh ones of every arm, behind those that choose.
        weight_decays: to try with the smallest and the largest batch, tuned as they are (F6.6); () leaves that out.
        steps: length of the baseline's trials; None is the baseline's.
    """

    stem: ClassVar[str] = "batch_size"

    batch_sizes: Sequence[int] | None = None
    equal: Sequence[Equal] = ("steps", "examples")
    retune: bool = True
    memories: Sequence[float] | None = None
    lr_ratio: float = 2.0
    reach: int = 8
    finalists: int = 3
    choosing_seeds: int = 3
    seeds: int = 5
    weight_decays: Sequence[float] = (1e-4, 1e-3, 1e-2)
    steps: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        for i, size in enumerate(self.batch_sizes or ()):
            check_integer(f"batch_sizes[{i}]", size)
        if isinstance(self.equal, str) or not self.equal or not set(self.equal) <= set(get_args(Equal)):
            names = "'steps', 'examples' or both, as in ('steps', 'examples')"
            raise ConfigError(f"equal={self.equal!r} must name {names}.")
        for i, memory in enumerate(self.memories or ()):
            check_number(f"memories[{i}]", memory, low=0.0, below=1.0)
        check_fields(self, "lr_ratio", lambda v: 1 < v < math.inf, "a finite number above 1")
        for name in ("reach", "finalists", "choosing_seeds", "seeds"):
            check_integer(name, getattr(self, name))
        for i, decay in enumerate(self.weight_decays):
            check_number(f"weight_decays[{i}]", decay)

    def extend(self, session: Session) -> None:
        """Run the study's trials inside a study that is already open."""
        arms, count = self.arms(session), self.choosing_seeds + self.seeds
        session.facts(batch_size={"choosing_seeds": self.choosing_seeds})
        run_round(session, [TrialRequest(Role.BASELINE, session.config)])
        collect_noise_scale(session)
        if self.retune:
            self._search(session, arms)
            finalists = [each for arm in arms for each in self._ranked(session, arm)[: self.finalists]]
            run_round(session, _under(STAGE, finalists, 0, self.choosing_seeds))
        best = [each for arm in arms for each in self._ranked(session, arm)[:1]] if self.retune else []
        fresh = [*_under(FIXED, arms, self.choosing_seeds, count), *_under(FRESH, best, self.choosing_seeds, count)]
        run_round(session, fresh)
        if self.retune and self.weight_decays:
            sizes, decayed = [arm.batch_size for arm in arms], []
            for size in (min(sizes), max(sizes)):  # at the baseline's number of steps or else their own
                same = [arm for arm in arms if arm.batch_size == size]
                arm = next((each for each in same if each.total_steps == session.config.total_steps), same[0])
                for tuned in self._ranked(session, arm)[:1]:
                    decayed += [tuned.replace(weight_decay=decay) for decay in self.weight_decays]
            run_round(session, _under(DECAY, decayed, 0, count))
        self._gaps(session)

    def arms(self, session: Session) -> list[TrainConfig]:
        """Return the baseline at every batch size and length, without repeats, the baseline itself first.

        Raises:
            UsageError: no other batch size fits the training data.
        """
        own, data = session.config, session.workload.train_data
        if not hasattr(data, "__len__"):
            raise UsageError(
                f"workload {session.workload.name!r}: the training data have no length, so batch sizes have no bound."
            )
        examples = len(data)
        sizes = self.batch_sizes
        if sizes is None:
            sizes = [size for size in (own.batch_size // 4, 4 * own.batch_size) if 1 <= size <= examples]
        found = [own]
        for size in sizes:
            if size > examples or size % own.accumulate_steps:
                raise UsageError(
                    f"batch size {size} does not fit: the training split has {examples:,} examples, and a batch is "
                    f"accumulated over {own.accumulate_steps} micro-batch(es)."
                )
            lengths = {"steps": own.total_steps, "examples": max(1, round(own.total_steps * own.batch_size / size))}
            for steps in dict.fromkeys(lengths[name] for name in self.equal):
                found += [_at(own, size, steps)] if size != own.batch_size else []
        if len(found) < 2:
            raise UsageError(
                f"no batch size beside the baseline's {own.batch_size} fits a training split of {examples:,} examples: "
                "give batch_sizes=[...]."
            )
        return list(dict.fromkeys(found))

    def _search(self, session: Session, arms: Sequence[TrainConfig]) -> None:
        """Ask for the next point of every arm and memory together, so that those of one batch size train as lanes."""
        while True:
            known = {(a.batch_size, a.total_steps): a for a in read_arms(session.record)}
            pairs = [(arm, known.get((arm.batch_size, arm.total_steps))) for arm in arms]
            requests = [TrialRequest(STAGE, config) for arm, found in pairs for config in self._next(arm, found)]
            if not requests:
                return
            run_round(session, requests)

    def _next(self, arm: TrainConfig, known: BatchArm | None) -> Iterator[TrainConfig]:
        """Yield what to try next with an arm: its grid of learning rates, with each memory that its rule may have."""
        name, memories = memory_field(arm.optimizer), [0.0]
        if name is not None:
            own = float(getattr(arm, name))
            tried = [1 - (1 - own) / 3, 1 - 3 * (1 - own)] if self.memories is None else self.memories
            memories = [value for value in dict.fromkeys([own, *tried]) if 0 <= value < 1]
        for memory in memories:
            centre, change = arm.peak_lr, {} if name is None else {name: memory}
            if name == "momentum":  # an average that is not normalised: the length of a step is lr / (1 - momentum)
                centre *= (1 - memory) / (1 - float(arm.momentum))
            points = known.points if known else ()
            values = {p.lr: p.value for p in points if math.isclose(p.memory, memory, abs_tol=1e-12)}
            sign = known.sign if known else 1.0
            for lr in next_points(values, centre, ratio=self.lr_ratio, reach=self.reach, sign=sign):
                yield arm.replace(peak_lr=lr, **change)

    def _ranked(self, session: Session, arm: TrainConfig) -> list[TrainConfig]:
        """Return what was tried with an arm, best first."""
        name, size = memory_field(arm.optimizer), (arm.batch_size, arm.total_steps)
        return [
            arm.replace(peak_lr=point.lr, **({name: point.memory} if name else {}))
            for found in read_arms(session.record)
            if (found.batch_size, found.total_steps) == size
            for point in found.ranked
        ]

    def _gaps(self, session: Session) -> None:
        """Store the loss on training examples of every selected checkpoint that was trained under a fresh seed."""
        workload, record = session.workload, session.record
        data: Any = workload.train_data
        if not len(record.trials) or in_its_own_order(data):
            return
        held = len(workload.validation_data) if hasattr(workload.validation_data, "__len__") else len(data)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:held]
        seen = workload.replace(train_data=Subset(data, order.tolist()))
        losses: dict[str, float] = dict(record.facts.get("train_losses") or {})
        fresh = ~record.trials["seed"].isin(choosing_seeds(record))
        rows = record.trials[(record.trials["state"] == "complete") & fresh]
        for number in rows["trial"].tolist():
            best = record.trial(number).best()
            if str(number) in losses or best.checkpoint is None:
                continue
            with isolated_rng():
                model = build_model(workload, session.config, session.device)
            found = evaluate(
                seen, load_model(model, best.checkpoint), split="train", batch_size=evaluation_batch(workload, session.config, session.device),
                precision=session.config.precision,
            )  # fmt: skip
            losses[str(number)] = next(e.value for e in found if e.metric == "loss")
        session.facts(train_losses=losses)


def _at(config: TrainConfig, batch_size: int, steps: int) -> TrainConfig:
    """Return a config with another batch size and length; what is counted in steps keeps its share of the run."""
    shares = {
        name: value if not value else max(1, round(value * steps / config.total_steps))
        for name in ("warmup_steps", "eval_every_steps", "checkpoint_every_steps")
        if (value := getattr(config, name)) is not None
    }
    return config.replace(batch_size=batch_size, total_steps=steps, eval_batch_size=None, **shares)


def _under(stage: Role, configs: Sequence[TrainConfig], first: int, end: int) -> list[TrialRequest]:
    """Return the trials of each config under the seeds from `first` to before `end`, counted from its own."""
    return [TrialRequest(stage, each) for one in configs for each in seeded(one, one.peak_lr, end)[first:]]
