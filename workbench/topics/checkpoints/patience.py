"""`stop_with_patience`: what early stopping with some patience would have kept of each run, and what that costs (P4.6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.selected_runs import SelectedRun, read_runs
from workbench.curves.trials import RecordLike
from workbench.topics.checkpoints.early_stopping import StoppingRule, patience_rule, replay, replay_rule

__all__ = ["Patience", "StoppedRun", "stop_with_patience"]


@dataclass(frozen=True, kw_only=True)
class StoppedRun:
    """One run, watched; values are those of the metric, whichever way is better.

    Attributes:
        trial: its number.
        total_steps: its full budget.
        steps: at which it was evaluated, shape (evaluations,).
        values: what was watched, shape (evaluations,).
        stop_step: where it is stopped; None where it runs to the end.
        kept_step: step of the checkpoint that is kept then; None where nothing finite was seen.
        kept: its value.
        best_step: step of the best of the full budget.
        best: its value.
        saved_frac: share of the steps that are not made.
        lost_frac: what is lost against the best of the full budget, over what the run learned.
    """

    trial: int
    total_steps: int
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    stop_step: int | None
    kept_step: int | None
    kept: float
    best_step: int
    best: float
    saved_frac: float
    lost_frac: float

    @property
    def words(self) -> str:
        """All of it as a sentence."""
        ends = "never stops" if self.stop_step is None else f"stops at step {self.stop_step:,} of {self.total_steps:,}"
        if self.kept_step is None:
            return f"Trial {self.trial} {ends}, with nothing finite to keep."
        kept = f"keeps {self.kept:.4g} of step {self.kept_step:,}"
        if self.kept_step == self.best_step:
            return f"Trial {self.trial} {ends} and {kept}, the best of the full budget: it saves {self.saved_frac:.0%} and loses nothing."
        lost = f"loses {self.lost_frac:.1%} of what was learned against the best of the full budget, {self.best:.4g} at step {self.best_step:,}"
        return f"Trial {self.trial} {ends} and {kept}: it saves {self.saved_frac:.0%} of the steps and {lost}."


@dataclass(frozen=True, kw_only=True)
class Patience:
    """A rule, what it does to each run, and its row beside those of `early_stopping`.

    Attributes:
        rule: the rule.
        runs: those that have enough finite evaluations.
        row: as in `early_stopping`; None without a run.
        select: what was watched, such as "validation/loss".
    """

    rule: StoppingRule
    runs: Sequence[StoppedRun]
    row: dict[str, Any] | None
    select: str = "metric"


def stop_with_patience(record: RecordLike, evaluations: int, *, runs: Sequence[SelectedRun] | None = None) -> Patience:
    """Replay a rule on the recorded runs: stop when so many evaluations in a row have brought no new best.

    Args:
        record: a study with finished runs, each evaluated at least a few times.
        evaluations: how many.
        runs: as `read_runs` returns them, for whoever asks again and again; None reads them.
    """
    sign = -1.0 if record.config.get("select_mode") == "max" else 1.0
    judged = [run for run in (read_runs(record) if runs is None else runs) if run.judged]
    rule = patience_rule(evaluations)
    return Patience(
        rule=rule,
        runs=[_stopped(run, rule, sign) for run in judged],
        row=replay_rule(rule, judged) if judged else None,
        select=str(record.config.get("select", "metric")),
    )


def _stopped(run: SelectedRun, rule: StoppingRule, sign: float) -> StoppedRun:
    stop = rule.stop(run.costs)
    kept, saved, share = replay(run, stop)
    return StoppedRun(
        trial=run.trial,
        total_steps=run.total_steps,
        steps=run.steps,
        values=sign * run.costs,
        stop_step=None if stop is None else int(run.steps[stop]),
        kept_step=None if kept is None else int(run.steps[kept]),
        kept=math.nan if kept is None else sign * float(run.costs[kept]),
        best_step=int(run.steps[run.best]),
        best=sign * float(run.costs[run.best]),
        saved_frac=saved,
        lost_frac=share,
    )
