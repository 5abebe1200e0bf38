"""Early-stopping rules, by name, replayed on recorded curves: what each would have kept, and what it would have saved (P4.6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.curves.selection import SelectedRun, metric_sign, read_runs
from workbench.curves.trial_curves import RecordLike

Floats = NDArray[np.float64]
COLUMNS = ["rule", "source", "runs", "stopped", "steps_saved", "lost", "lost_frac", "worst_lost_frac", "test_lost"]


class StoppingRule(NamedTuple):
    """When a run that is watched would be stopped."""

    name: str
    source: str
    stop: Callable[[Floats], int | None]
    """Costs in order (smaller is better, NaN allowed) -> place of the evaluation that it stops at, None for never."""


def _patience(costs: Floats, *, evaluations: int, min_delta_frac: float = 0.0) -> int | None:
    """Stop when so many evaluations in a row have brought no new best, by more than a share of the old one."""
    best, at = math.inf, 0
    for place, cost in enumerate(costs):
        margin = min_delta_frac * abs(best) if math.isfinite(best) else 0.0
        if cost < best - margin:
            best, at = float(cost), place
        elif place - at >= evaluations:
            return place
    return None


def _generalisation_loss(costs: Floats, *, percent: float) -> int | None:
    """Stop when the cost is so many percent above the lowest so far; never where the lowest is not above 0."""
    lowest = np.minimum.accumulate(np.where(np.isfinite(costs), costs, np.inf))
    with np.errstate(invalid="ignore", divide="ignore"):
        above = (lowest > 0) & np.isfinite(lowest) & (100.0 * (costs / lowest - 1.0) > percent)
    return int(above.argmax()) if above.any() else None


def _successive_rises(costs: Floats, *, rises: int) -> int | None:
    """Stop when the cost has risen from one evaluation to the next so many times in a row."""
    risen = np.diff(costs) > 0
    ends = (k + rises for k in range(risen.size - rises + 1) if risen[k : k + rises].all())
    return next(ends, None)


def _twice_as_long(costs: Floats, *, start: int) -> int | None:
    """Stop when twice as many evaluations have gone by as until the best, and at least `start`."""
    at, best = 0, math.inf
    for place, cost in enumerate(costs):
        if cost < best:
            best, at = float(cost), place
        elif place >= max(start, 2 * at):
            return place
    return None


def _patience_rule(evaluations: int) -> StoppingRule:
    return StoppingRule(f"patience {evaluations}", "rule of thumb", partial(_patience, evaluations=evaluations))


RULES: tuple[StoppingRule, ...] = (
    *map(_patience_rule, (1, 3, 10)),
    StoppingRule("patience 3, by 1 %", "rule of thumb", partial(_patience, evaluations=3, min_delta_frac=0.01)),
    StoppingRule("GL 2", "Prechelt 1998", partial(_generalisation_loss, percent=2.0)),
    StoppingRule("GL 5", "Prechelt 1998", partial(_generalisation_loss, percent=5.0)),
    StoppingRule("UP 3", "Prechelt 1998", partial(_successive_rises, rises=3)),
    StoppingRule("twice as long", "after Bengio 2012, arXiv:1206.5533", partial(_twice_as_long, start=5)),
)
"""GL and UP with every evaluation as the end of a strip; patience counts evaluations."""


def early_stopping(record: RecordLike) -> pd.DataFrame:
    """Replay every rule on the recorded runs, and hold what it keeps against the best of the full budget (P4.6).

    A rule keeps the best checkpoint up to where it stops, so on the split that is watched it can lose and never win. What it loses
    on the test split is worth more: there the full budget has no such advantage.

    Returns:
        One row a rule: rule, source, runs, stopped (how many it cut short), steps_saved (mean share of the budget), lost (mean, in
        units of the metric, positive is worse), lost_frac and worst_lost_frac (of what the run had learned), test_lost (mean;
        NaN where the test split was not evaluated).
    """
    return pd.DataFrame(replay_rules(read_runs(record)), columns=COLUMNS)


def replay_rules(runs: Sequence[SelectedRun]) -> list[dict[str, Any]]:
    """Return the rows of `early_stopping` for these runs; none where none can be judged."""
    judged = [run for run in runs if run.judged]
    return [_replay_rule(rule, judged) for rule in RULES] if judged else []


def _replay_rule(rule: StoppingRule, runs: Sequence[SelectedRun]) -> dict[str, Any]:
    replayed = []
    for run in runs:
        kept, saved, share = _replay(run, rule.stop(run.costs))
        lost = [math.inf, math.nan]
        if kept is not None:
            lost = [float(costs[kept] - costs[run.best]) for costs in (run.costs, run.test_costs)]
        replayed.append([saved, share, *lost])
    saves, shares, losses, tested = np.array(replayed).T
    return {
        "rule": rule.name, "source": rule.source, "runs": len(runs), "stopped": int((saves > 0).sum()),
        "steps_saved": float(saves.mean()), "lost": float(losses.mean()), "lost_frac": float(shares.mean()),
        "worst_lost_frac": float(shares.max()), "test_lost": float(tested.mean()),
    }  # fmt: skip


def _replay(run: SelectedRun, stop: int | None) -> tuple[int | None, float, float]:
    """Return the evaluation that is kept, the share of steps saved, and what is lost over what was learned."""
    end = run.costs.size - 1 if stop is None else stop
    saved = 0.0 if stop is None else float(1.0 - run.steps[end] / run.total_steps)
    seen = np.where(np.isfinite(run.costs), run.costs, np.inf)[: end + 1]
    kept = int(seen.argmin())
    if math.isinf(seen[kept]):
        return None, saved, math.inf
    return kept, saved, float(run.costs[kept] - run.costs[run.best]) / run.learned if run.learned > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class StoppedRun:
    """One run, watched; values are those of the metric, whichever way is better.

    Attributes:
        steps, values: of its evaluations, shape (evaluations,).
        stop_step: where it is stopped; None where it runs to the end.
        kept_step, kept: of the checkpoint that is kept then; None and NaN where nothing finite was seen.
        saved_frac: share of the steps that are not made.
        lost_frac: what is lost against the best of the full budget, over what the run learned.
    """

    trial: int
    total_steps: int
    steps: NDArray[np.int64]
    values: Floats
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


class Patience(NamedTuple):
    """A rule, what it does to each run that can be judged, and its row beside those of `early_stopping`."""

    rule: StoppingRule
    runs: Sequence[StoppedRun]
    row: dict[str, Any] | None
    select: str


def stop_with_patience(record: RecordLike, evaluations: int, *, runs: Sequence[SelectedRun] | None = None) -> Patience:
    """Replay a rule on the recorded runs: stop when so many evaluations in a row have brought no new best."""
    sign, rule, stopped = metric_sign(record), _patience_rule(evaluations), []
    judged = [run for run in (read_runs(record) if runs is None else runs) if run.judged]
    for run in judged:
        stop = rule.stop(run.costs)
        kept, saved, share = _replay(run, stop)
        stopped.append(StoppedRun(
            trial=run.trial, total_steps=run.total_steps, steps=run.steps, values=sign * run.costs,
            stop_step=None if stop is None else int(run.steps[stop]), kept_step=None if kept is None else int(run.steps[kept]),
            kept=math.nan if kept is None else sign * float(run.costs[kept]), best_step=int(run.steps[run.best]),
            best=sign * float(run.costs[run.best]), saved_frac=saved, lost_frac=share,
        ))  # fmt: skip
    row = _replay_rule(rule, judged) if judged else None
    return Patience(rule, stopped, row, str(record.config.get("select", "metric")))
