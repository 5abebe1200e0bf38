"""`read_ladder`: the thresholds that were tried at one lr, which of them keeps training stable, and at what price."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from workbench.curves.clipped_runs import max_grad_norm_of
from workbench.curves.trials import RecordLike
from workbench.record.roles import Role

__all__ = ["Rung", "is_calm", "is_cured", "leading", "masks", "read_ladder"]

_WORSE = {"none": 0, "not_measured": 0, "recovered": 1, "settling": 2, "lasting": 3, "divergent": 4}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The runs with one threshold at one lr, one a seed.

    Attributes:
        lr: peak learning rate.
        max_grad_norm: threshold.
        rows: what `clipped_runs` returns for them.
        clip_frac: share of the steps that were clipped, mean over the seeds; None where unknown.
        cured: how many of them are more stable than the same run without clipping.
        lasting: how many did not come back.
    """

    lr: float
    max_grad_norm: float
    rows: tuple[Mapping[str, Any], ...]
    clip_frac: float | None
    cured: int
    lasting: int

    @property
    def passes(self) -> bool:
        """Every seed trains, cured where it was sick: what only some seeds show is no cure."""
        return all(
            not row["lasting"] and (row["twin"] is None or is_cured(row) or is_calm(row, "twin_outcome"))
            for row in self.rows
        )

    def cures(self, *, aggressive_frac: float = 0.5, unstable_lr: float | None = None) -> bool:
        """It passes, and neither hides the instability nor clips so much that it is a smaller lr in disguise (F4.11)."""
        heavy = self.clip_frac is not None and self.clip_frac >= aggressive_frac
        return self.passes and not heavy and not any(masks(row, unstable_lr) for row in self.rows)


def is_calm(row: Mapping[str, Any], name: str = "outcome") -> bool:
    """Tell whether a run, or with "twin_outcome" the same run without clipping, shows no rise at all."""
    return _WORSE.get(str(row[name]), 4) == 0 and not row["lasting" if name == "outcome" else "twin_lasting"]


def is_cured(row: Mapping[str, Any]) -> bool:
    """Tell whether a clipped run is stable where the same run without clipping is not.

    A run that did not come back is cured when it does; a mere rise that came back is cured only when it is gone.
    """
    if row["twin"] is None or row["lasting"]:
        return False
    return bool(row["twin_lasting"]) or (not is_calm(row, "twin_outcome") and is_calm(row))


def masks(row: Mapping[str, Any], unstable_lr: float | None, *, cycle: float = -0.9) -> bool | None:
    """Tell whether clipping hides an lr that is too high: stable only for as long as nearly every step is clipped.

    Above the edge of stability clipped gradient descent settles in a 2-cycle of span lr * threshold: the loss stays
    bounded, the norm stays parked above the threshold, and nothing is learned any more.

    Args:
        row: one of `clipped_runs`.
        unstable_lr: where instability starts without clipping, from a sweep; it counts where the same run without
            clipping was not made.
        cycle: an `alternation` down to this is the swing of a 2-cycle, which comes to rest nowhere (rule of thumb).

    Returns:
        None where nobody knows: whether the lr is too high, or what would become of a run that is still learning when
        it ends, without such a swing.
    """
    too_high = row["twin_lasting"]
    if too_high is None:
        too_high = None if unstable_lr is None else row["lr"] >= unstable_lr
    hides = bool(too_high and not row["lasting"] and row["parked"])
    swings = row["alternation"] is not None and row["alternation"] <= cycle
    return None if too_high is None or (hides and row["falling"] and not swings) else hides


def read_ladder(record: RecordLike, rows: Sequence[Mapping[str, Any]]) -> list[Rung]:
    """Return the thresholds tried, loosest first: the baseline's own where it clips, and those of the clipping study.

    Args:
        record: a study, or a single trial.
        rows: what `clipped_runs` returns.
    """
    chosen = [row for row in rows if row["stage"] == Role.CLIPPING] or list(rows)
    lr = record.facts.get("clipping_lr")
    at_lr = [row for row in chosen if isinstance(lr, float) and math.isclose(row["lr"], lr, rel_tol=1e-9)]
    groups: dict[tuple[float, float], list[Mapping[str, Any]]] = {}
    for row in at_lr or chosen:
        groups.setdefault((row["lr"], row["max_grad_norm"]), []).append(row)
    return [_rung(lr, limit, group) for (lr, limit), group in sorted(groups.items(), key=lambda kv: -kv[0][1])]


def leading(
    record: RecordLike,
    rows: Sequence[Mapping[str, Any]],
    *,
    aggressive_frac: float = 0.5,
    unstable_lr: float | None = None,
) -> tuple[Rung | None, Literal["own", "passes", "tightest"]]:
    """Return the threshold that verdicts are about, and why that one.

    "own": the baseline clips, so its runs; "passes": the loosest that cures, else the loosest that keeps training stable at
    whatever price; "tightest": none does.

    Args:
        record: a study, or a single trial.
        rows: what `clipped_runs` returns.
        aggressive_frac: see `Rung.cures`.
        unstable_lr: see `masks`.
    """
    limit, lr = max_grad_norm_of(record.config), record.config.get("peak_lr")
    own = [r for r in rows if r["max_grad_norm"] == limit and r["lr"] == lr] if limit is not None else []
    own = [
        row for row in own if row["twin"] is not None
    ] or own  # a proof trains more seeds, and those with clipping only
    if own:
        return _rung(own[0]["lr"], own[0]["max_grad_norm"], own), "own"
    ladder = read_ladder(record, rows)
    curing = [rung for rung in ladder if rung.cures(aggressive_frac=aggressive_frac, unstable_lr=unstable_lr)]
    passing = curing or [rung for rung in ladder if rung.passes]
    if passing:
        return passing[0], "passes"
    return (ladder[-1] if ladder else None), "tightest"


def _rung(lr: float, limit: float, rows: Sequence[Mapping[str, Any]]) -> Rung:
    shares = [row["clip_frac"] for row in rows if row["clip_frac"] is not None]
    return Rung(
        lr=lr,
        max_grad_norm=limit,
        rows=tuple(rows),
        clip_frac=float(np.mean(shares)) if shares else None,
        cured=sum(is_cured(row) for row in rows),
        lasting=sum(bool(row["lasting"]) for row in rows),
    )
