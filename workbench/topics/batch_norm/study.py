"""`BatchNormStudy`: how many examples a batch-norm statistic should have, on how many devices, and which norm else (P6)."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, get_args

from torch import nn

from workbench.checks import check_integer, check_number
from workbench.config import TrainConfig
from workbench.curves.selection import metric_sign
from workbench.errors import ConfigError, UsageError
from workbench.record.read import TrialRecord
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session, open_session
from workbench.topics.batch_norm.collect import Shards, collect_batch_norm, measure_devices, norm_model
from workbench.topics.lr_sweep.study import TrialRequest, run_round, seeded
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.batch_norm import Norm, batch_norm_layers, replace_batch_norm

VIRTUAL, HELD, SPLIT, SWAP = Role.BATCH_NORM_VIRTUAL, Role.BATCH_NORM_HELD, Role.BATCH_NORM_SPLIT, Role.BATCH_NORM_SWAP


@dataclass(frozen=True, kw_only=True)
class BatchNormStudy(Study):
    """Virtual batches of several sizes at a fixed total batch, held and coupled statistics, simulated devices, and other norms.

    All trials have the baseline's settings but for what is compared; those of one virtual batch train side by side.

    Attributes:
        batch_size: the total batch that the virtual ones, and the devices, divide; None is the baseline's.
        stat_examples: virtual batches to try, below the total batch; None is 8, 16, 32, ... (P6.4). The whole batch is
            always tried.
        batch_sizes: for statistics that are held against those that grow with the batch (P6.5); None is the total batch and, where
            it is larger, that of `held`; () leaves this out.
        held: statistic examples where they are held (64 in P6.4).
        devices: that the total batch is split over (P6.2), as far as each has 2 examples; () leaves this out.
        shards: how the training data are shared out for running statistics: "dealt", "sorted" by label.
        norms: to try in the place of batch norm (P6.1): "layer", "group"; () leaves this out. They train in this process, in
            studies of their own in the folder `norms`.
        swap_batch_sizes: at which; None is 4 and the total batch.
        lr_factors: learning rates of every norm at every batch size, over the baseline's: the same budget for each.
        seeds: of every arm, the baseline's own and those after it.
        steps: length of a trial; None is the baseline's.
    """

    stem: ClassVar[str] = "batch_norm"

    batch_size: int | None = None
    stat_examples: Sequence[int] | None = None
    batch_sizes: Sequence[int] | None = None
    held: int = 64
    devices: Sequence[int] = (1, 2, 4, 8)
    shards: Sequence[Shards] = ("dealt", "sorted")
    norms: Sequence[Norm] = ("layer", "group")
    swap_batch_sizes: Sequence[int] | None = None
    lr_factors: Sequence[float] = (0.25, 1.0)
    seeds: int = 3
    steps: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        counts: dict[str, Any] = {"held": self.held, "seeds": self.seeds}
        counts |= {} if self.batch_size is None else {"batch_size": self.batch_size}
        for name in ("stat_examples", "batch_sizes", "devices", "swap_batch_sizes"):
            counts |= {f"{name}[{i}]": value for i, value in enumerate(getattr(self, name) or ())}
        for name, value in counts.items():
            check_integer(name, value)
        for name, allowed in (("shards", get_args(Shards)), ("norms", get_args(Norm))):
            given = getattr(self, name)
            if isinstance(given, str) or not set(given) <= set(allowed):
                raise ConfigError(f"{name}={given!r} must be a list of {' and '.join(map(repr, allowed))}, or ().")
        for i, factor in enumerate(self.lr_factors):
            check_number(f"lr_factors[{i}]", factor)
        if self.norms and not self.lr_factors:
            raise ConfigError("lr_factors=() must hold at least one; norms=() leaves the comparison of norms out.")

    def extend(self, session: Session) -> None:
        """Run the study's trials inside a study that is already open; none for a model without batch norm.

        Raises:
            UsageError: a size does not fit the training data, or norms are to train elsewhere.
        """
        with isolated_rng():
            model = build_model(session.workload, session.config.replace(bn_stat_examples=None), session.device)
        if not batch_norm_layers(model):
            session.facts(batch_norm={"layers": 0})
            return
        if self.norms and session.executor is not None:
            raise UsageError(
                "wb.batch_norm.Study trains other norms in this process only: take executor='local', or norms=()."
            )
        total = self._at(session, self.batch_size or session.config.batch_size)
        tried = {VIRTUAL: self._virtual(total), HELD: self._held(session, total), SPLIT: self._split(total)}
        tried[SWAP] = self._swap(session, total) if self.norms else []
        arms = {
            stage: [each for one in dict.fromkeys(ones) for each in seeded(one, one.peak_lr, self.seeds)]
            for stage, ones in tried.items()
        }
        flat = [TrialRequest(stage, one) for stage, configs in arms.items() for one in configs]
        done = dict(zip(((one.role, one.config) for one in flat), run_round(session, flat), strict=True))
        for stage, configs in arms.items():
            session.facts(**{stage: [done[stage, one].number for one in configs]})
        session.facts(batch_norm=collect_batch_norm(session, total))
        if self.devices:
            model, _ = norm_model(session, total)
            measured = measure_devices(
                session, model, batch_size=total.batch_size, devices=self.devices, shards=self.shards
            )
            session.facts(batch_norm_devices=measured)
        if self.norms:
            session.facts(**{SWAP: self._swapped(session, arms[SWAP], [done[SWAP, one] for one in arms[SWAP]])})

    def _at(self, session: Session, size: int) -> TrainConfig:
        """Return the baseline with another batch size, its steps unchanged, in one piece and with whole-batch statistics."""
        data: Any = session.workload.train_data
        if hasattr(data, "__len__") and size > len(data):
            raise UsageError(f"batch size {size} does not fit: the training split has {len(data):,} examples.")
        own = session.config
        batch = own.eval_batch_size if own.eval_batch_size is None or own.eval_batch_size >= size else None
        return own.replace(batch_size=size, accumulate_steps=1, eval_batch_size=batch, bn_stat_examples=None)

    def _virtual(self, total: TrainConfig) -> list[TrainConfig]:
        sizes = self.stat_examples
        if sizes is None:
            sizes = [2**k for k in range(3, 32) if 2**k < total.batch_size]
        return [total, *(total.replace(bn_stat_examples=size) for size in sizes if size < total.batch_size)]

    def _held(self, session: Session, total: TrainConfig) -> list[TrainConfig]:
        sizes = self.batch_sizes
        if sizes is None:
            sizes = sorted({min(self.held, total.batch_size), total.batch_size})
        arms = []
        for size in sizes:
            whole = self._at(session, size)
            arms += [whole] if size <= self.held else [whole, whole.replace(bn_stat_examples=self.held)]
        return arms

    def _split(self, total: TrainConfig) -> list[TrainConfig]:
        """Return the total batch on several devices: each normalises its own part, and gradients are averaged.

        Micro-batches stand for devices; their running statistics, by updates, are what those of the devices are on average.
        """
        fitting = [k for k in self.devices if total.batch_size % k == 0 and total.batch_size // k >= 2]
        return [total.replace(accumulate_steps=k) for k in fitting]

    def _swap(self, session: Session, total: TrainConfig) -> list[TrainConfig]:
        sizes = self.swap_batch_sizes or [size for size in (4, total.batch_size) if size <= total.batch_size]
        arms = [self._at(session, size) for size in dict.fromkeys(sizes)]
        return [arm.replace(peak_lr=arm.peak_lr * factor) for arm in arms for factor in self.lr_factors]

    def _swapped(
        self, session: Session, configs: Sequence[TrainConfig], batch: Sequence[TrialRecord]
    ) -> list[dict[str, Any]]:
        """Train every config with every other norm; return a row for each norm, batch size and lr."""
        records: dict[str, Sequence[TrialRecord]] = {"batch": batch}
        for norm in self.norms:
            build = partial(_with_norm, session.workload.build_model, norm)
            with open_session(
                session.workload.replace(build_model=build, config=session.config), stem=SWAP, settings={"norm": norm},
                trainer=session.trainer, out=session.writer.path / "norms" / re.sub(r"\W", "_", norm),
                note=f"{norm} norm in the place of batch norm, part of a study of batch norm",
            ) as part:  # fmt: skip
                records[norm] = part.trials(configs, stage=SWAP)
        lost, rows = metric_sign(session.record) * math.inf, list[dict[str, Any]]()
        for kind, found in records.items():
            values: dict[tuple[int, float], list[float]] = {}
            for config, record in zip(configs, found, strict=True):
                best = record.best()
                value = lost if best.checkpoint is None or record.state != "complete" else float(best.value)
                values.setdefault((config.batch_size, config.peak_lr), []).append(value)
            rows += [
                {"norm": kind, "batch_size": size, "lr": lr, "values": seen, "mean": sum(seen) / len(seen)}
                for (size, lr), seen in values.items()
            ]
        return rows


def _with_norm(build: Any, norm: Norm) -> nn.Module:
    return replace_batch_norm(build(), norm)
