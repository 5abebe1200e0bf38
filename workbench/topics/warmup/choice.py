"""`warmup_choice`: what a warmup of some length to some learning rate asks of the run, and the trial that is nearest to it (F3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.warmup.search import cap_steps

__all__ = ["TriedWarmup", "WarmupChoice", "tried_warmups", "warmup_choice"]


@dataclass(frozen=True, kw_only=True)
class TriedWarmup:
    """One warmup that a study trained.

    Attributes:
        trial: number of its longest run.
        steps: of the ramp that was prepended.
        lr: at its top.
        full: a run of the full budget; else the short trial of F3.7.
        passes: it trained stably; None where that could not be judged.
    """

    trial: int
    steps: int
    lr: float
    full: bool
    passes: bool | None


@dataclass(frozen=True, kw_only=True)
class WarmupChoice:
    """A warmup that somebody looks at. Shares are shares of the baseline's steps, before a warmup is prepended (O4).

    Attributes:
        steps: of the ramp that is prepended.
        lr: at its top.
        total_steps: of the baseline.
        lengthen_from: more steps than this, and the run may have to grow (F3.14).
        cap: no more steps than this (F3.10).
        unstable_lr: learning rate that is unstable without a warmup; None where unknown.
        nearest: trial with the nearest learning rate, and the nearest length at that; None where nothing was tried.
    """

    steps: int
    lr: float
    total_steps: int
    lengthen_from: int
    cap: int
    unstable_lr: float | None
    nearest: TriedWarmup | None

    @property
    def share(self) -> float:
        """The warmup over the baseline's steps."""
        return self.steps / self.total_steps

    @property
    def words(self) -> str:
        """All of it in a few sentences."""
        said = f"{self.steps:,} steps of warmup are {self.share:.1%} of the baseline's {self.total_steps:,}"
        if self.steps > self.cap:
            said += f": above the cap of 10 %, {self.cap:,} steps (F3.10). "
        elif self.steps > self.lengthen_from:
            said += f": above 5 %, {self.lengthen_from:,} steps, so plan {self.total_steps + self.steps:,} steps (F3.14); below the cap of 10 %, {self.cap:,}. "
        else:
            said += (
                f": at most 5 % ({self.lengthen_from:,} steps, F3.14) and below the cap of 10 % ({self.cap:,}, F3.10). "
            )
        if self.unstable_lr:
            said += f"lr {self.lr:.4g} is {self.lr / self.unstable_lr:.3g} x the one that is unstable without warmup ({self.unstable_lr:.4g}). "
        if self.nearest is None:
            return said + "No trial of a warmup was run."
        one = self.nearest
        how = {True: "trains", False: "does not train", None: "cannot be judged"}[one.passes]
        kind = "run of the full budget" if one.full else "short trial"
        return f"{said}Nearest that was run: trial {one.trial}, {one.steps:,} steps to lr {one.lr:.4g}, a {kind} that {how}."


def tried_warmups(diagnosis: Diagnosis) -> list[TriedWarmup]:
    """Return every warmup that was tried, with its longest run, by learning rate and length.

    Args:
        diagnosis: of `diagnose_warmup`.
    """
    found = diagnosis["warmup.shortest"].evidence if "warmup.shortest" in diagnosis else {}
    rounds: Sequence[Mapping[str, Any]] = found.get("rounds") or ()
    tried = []
    for row in rounds:
        for one in row["lengths"]:
            full = one.get("full_trial") is not None
            trial = one.get("full_trial" if full else "short_trial")
            if trial is not None:
                passes = one["short"] if one["full"] is None else one["full"]
                tried.append(
                    TriedWarmup(
                        trial=int(trial), steps=int(one["steps"]), lr=float(row["lr"]), full=full, passes=passes
                    )
                )
    return sorted(tried, key=lambda one: (one.lr, one.steps))


def warmup_choice(
    record: RecordLike,
    diagnosis: Diagnosis,
    *,
    steps: int,
    lr: float,
    cap_frac: float = 0.1,
    lengthen_frac: float = 0.05,
) -> WarmupChoice:
    """Hold a warmup against the limits of F3 and against what was tried.

    Args:
        record: a study of warmups.
        diagnosis: of `diagnose_warmup`.
        steps: of the ramp that is prepended to the baseline.
        lr: at its top.
        cap_frac: largest share of the baseline's steps that a warmup may take (F3.10).
        lengthen_frac: above this share the run may have to grow (F3.14).
    """
    total = int(record.config["total_steps"])
    unstable = diagnosis["warmup.shortest"].evidence.get("unstable_lr") if "warmup.shortest" in diagnosis else None
    return WarmupChoice(
        steps=steps,
        lr=lr,
        total_steps=total,
        lengthen_from=cap_steps(total, lengthen_frac),
        cap=cap_steps(total, cap_frac),
        unstable_lr=float(unstable) if unstable else None,
        nearest=min(
            tried_warmups(diagnosis),
            key=lambda one: (round(abs(math.log(one.lr / lr)), 9), abs(one.steps - steps), not one.full),
            default=None,
        ),
    )
