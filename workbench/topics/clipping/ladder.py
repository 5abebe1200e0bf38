"""The candidate thresholds that a clipping study tried, and what its clipped runs show of each (F4.9 to F4.12)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from workbench.curves.clipping import max_grad_norm_of
from workbench.curves.trial_curves import RecordLike
from workbench.record.roles import Role


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The runs with one threshold at one lr, one a seed; `clip_frac` is the share of steps clipped, mean over the seeds."""

    lr: float
    max_grad_norm: float
    rows: tuple[Mapping[str, Any], ...]
    clip_frac: float | None

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Candidate:
        """Return the candidate of some rows of `clipped_runs` with one lr and threshold."""
        shares = [row["clip_frac"] for row in rows if row["clip_frac"] is not None]
        frac, first = float(np.mean(shares)) if shares else None, rows[0]
        return cls(lr=first["lr"], max_grad_norm=first["max_grad_norm"], rows=tuple(rows), clip_frac=frac)

    @property
    def cured(self) -> int:
        """How many of the runs are more stable than the same run without clipping."""
        return sum(map(is_cured, self.rows))

    @property
    def lasting(self) -> int:
        """How many of the runs did not recover."""
        return sum(bool(row["lasting"]) for row in self.rows)

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
    return str(row[name]) in ("none", "not_measured") and not row["lasting" if name == "outcome" else "twin_lasting"]


def is_cured(row: Mapping[str, Any]) -> bool:
    """Tell whether a clipped run is stable where the same run without clipping is not."""
    if row["twin"] is None or row["lasting"]:
        return False
    return bool(row["twin_lasting"]) or (not is_calm(row, "twin_outcome") and is_calm(row))


def masks(row: Mapping[str, Any], unstable_lr: float | None, *, cycle: float = -0.9) -> bool | None:
    """Tell whether clipping hides an lr that is too high: stable only for as long as nearly every step is clipped.

    Above the edge of stability clipped gradient descent settles in a 2-cycle of span lr * threshold: the loss stays
    bounded, the norm stays parked above the threshold, and nothing is learned any more. An `alternation` down to `cycle` is its swing
    (rule of thumb). `unstable_lr` counts where the same run without clipping was not made. None where nobody knows: whether the lr is
    too high, or what would become of a run that is still learning when it ends, without such a swing.
    """
    too_high = row["twin_lasting"]
    if too_high is None:
        too_high = None if unstable_lr is None else row["lr"] >= unstable_lr
    hides = bool(too_high and not row["lasting"] and row["parked"])
    swings = row["alternation"] is not None and row["alternation"] <= cycle
    return None if too_high is None or (hides and row["falling"] and not swings) else hides


def read_ladder(record: RecordLike, rows: Sequence[Mapping[str, Any]]) -> list[Candidate]:
    """Return the thresholds tried, loosest first: those of the clipping study, or all."""
    chosen = [row for row in rows if row["stage"] == Role.CLIPPING] or list(rows)
    lr = record.facts.get("clipping_lr")
    at_lr = [row for row in chosen if isinstance(lr, float) and math.isclose(row["lr"], lr, rel_tol=1e-9)]
    groups: dict[tuple[float, float], list[Mapping[str, Any]]] = {}
    for row in at_lr or chosen:
        groups.setdefault((row["lr"], row["max_grad_norm"]), []).append(row)
    return [Candidate.of(group) for _, group in sorted(groups.items(), key=lambda item: -item[0][1])]


def leading(
    record: RecordLike,
    rows: Sequence[Mapping[str, Any]],
    *,
    aggressive_frac: float = 0.5,
    unstable_lr: float | None = None,
) -> tuple[Candidate | None, Literal["own", "passes", "tightest"]]:
    """Return the threshold that the verdicts are about, and why: the baseline's own, the loosest that works, or the tightest."""
    limit, lr = max_grad_norm_of(record.config), record.config.get("peak_lr")
    own = [row for row in rows if limit is not None and row["max_grad_norm"] == limit and row["lr"] == lr]
    if own:  # a proof trains more seeds, and those with clipping only
        return Candidate.of([row for row in own if row["twin"] is not None] or own), "own"
    ladder = read_ladder(record, rows)
    curing = [one for one in ladder if one.cures(aggressive_frac=aggressive_frac, unstable_lr=unstable_lr)]
    passing = curing or [one for one in ladder if one.passes]
    if passing:
        return passing[0], "passes"
    return (ladder[-1] if ladder else None), "tightest"
