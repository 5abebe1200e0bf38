"""What another learning rate of the sweep would win: by the metric that selects checkpoints, and by training loss (F1.6, P4.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.curves.chance import ignorance
from workbench.curves.lr_points import LRPoint, SweepTable
from workbench.curves.selection import selected
from workbench.curves.trials import RecordLike
from workbench.record.read import periodic_rows

__all__ = ["Rival", "best_rival"]


@dataclass(frozen=True, kw_only=True)
class Rival:
    """The best of some other learning rates, held against the person's own.

    Attributes:
        lr: the learning rate.
        select: what selects checkpoints; "training loss" where the record has no evaluations of it.
        own: the metric with the person's lr, under the seeds that both were trained with.
        value: the same with this one.
        gain: how much better `value` is; below 0 where it is worse.
        noise: of this lr's metric from evaluation to evaluation.
        share: `gain` as a share of what this lr learned by this metric; infinite where the own lr has no finite value.
        lost: how much higher the own training loss ends, as a share of what the sweep learned.
    """

    lr: float
    select: str
    own: float
    value: float
    gain: float
    noise: float
    share: float
    lost: float

    def shows(self, share: float, *, noise_sds: float = 2.0) -> bool:
        """Tell whether the own lr loses at least this share of what could be learned, and more than the noise."""
        return self.share >= share and self.gain > noise_sds * self.noise

    @property
    def words(self) -> str:
        """The two results."""
        return f"{self.select} {self.own:.4g} against {self.value:.4g}"


def best_rival(
    record: RecordLike, table: SweepTable, own: LRPoint, indices: Sequence[int], *, noise_sds: float = 2.0
) -> Rival | None:
    """Return the best of some points by the selected metric, its noise counted against it; None where there is none.

    Args:
        record: the study, with its evaluations.
        table: its sweep.
        own: the point of the person's lr.
        indices: of the points that may be better.
        noise_sds: how many standard deviations of its noise count against a point.
    """
    select = str(record.config.get("select", ""))
    sign = 1.0 if record.config.get("select_mode", "min") == "min" else -1.0
    found = []
    for index in indices:
        point = table.points[index]
        ours, theirs = (_under(record, p, set(own.seeds) & set(point.seeds)) for p in (own, point))
        if theirs:
            found.append((sign * theirs[select] + noise_sds * theirs["noise"], point, ours.get(select), theirs))
    if not found:
        return _by_training(table, own, indices)
    _, point, mine, theirs = min(found, key=lambda item: item[0])
    lost = (own.loss - point.loss) / table.progress
    common: dict[str, Any] = {
        "lr": point.lr,
        "select": select,
        "value": theirs[select],
        "noise": theirs["noise"],
        "lost": lost,
    }
    if mine is None:
        return Rival(own=np.nan, gain=np.inf, share=np.inf, **common)
    gain, learned = sign * (mine - theirs[select]), _start(record, table, point, select, sign) - sign * theirs[select]
    return Rival(own=mine, gain=gain, share=gain / learned if learned > 0 else 0.0, **common)


def _under(record: RecordLike, point: LRPoint, seeds: set[int]) -> dict[str, float]:
    if not len(record.evals) or "select" not in record.config:
        return {}
    return selected(record, [n for n, seed in zip(point.trials, point.seeds, strict=True) if seed in seeds])


def _start(record: RecordLike, table: SweepTable, point: LRPoint, select: str, sign: float) -> float:
    """Return the cost of knowing nothing: the metric before the first step, or chance where it is a loss."""
    split, metric = select.split("/", 1)
    rows = periodic_rows(record.evals)
    rows = rows[(rows["trial"] == point.trials[0]) & (rows["split"] == split) & (rows["metric"] == metric)]
    first = sign * float(rows.sort_values("step")["value"].iloc[0])
    return ignorance(first, table.chance) if metric == "loss" else first


def _by_training(table: SweepTable, own: LRPoint, indices: Sequence[int]) -> Rival | None:
    finite = [table.points[i] for i in indices if np.isfinite(table.points[i].loss)]
    if not finite:
        return None
    point = min(finite, key=lambda p: p.loss)
    gain, noise = own.loss - point.loss, point.loss_se if np.isfinite(point.loss_se) else 0.0
    share = gain / max(table.level - point.loss, 1e-300)
    return Rival(
        lr=point.lr, select="training loss", own=own.loss, value=point.loss, gain=gain, noise=noise, share=share,
        lost=gain / table.progress,
    )  # fmt: skip
