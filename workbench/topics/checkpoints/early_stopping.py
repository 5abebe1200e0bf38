"""Early-stopping rules, by name, replayed on recorded curves: what each would have kept, and what it would have saved (P4.6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.curves.selected_runs import SelectedRun, read_runs
from workbench.curves.trials import RecordLike

__all__ = ["RULES", "StoppingRule", "early_stopping", "patience_rule", "replay", "replay_rule", "replay_rules"]

Floats = NDArray[np.float64]

COLUMNS = ["rule", "source", "runs", "stopped", "steps_saved", "lost", "lost_frac", "worst_lost_frac", "test_lost"]


class StoppingRule(NamedTuple):
    """When a run that is watched would be stopped.

    Attributes:
        name: how it is called.
        source: where it is from, or "rule of thumb".
        stop: costs (smaller is better, NaN allowed), in order -> place of the evaluation that it stops at, None for never.
    """

    name: str
    source: str
    stop: Callable[[Floats], int | None]


def patience(costs: Floats, *, evaluations: int, min_delta_frac: float = 0.0) -> int | None:
    """Stop when so many evaluations in a row have brought no new best.

    Args:
        costs: smaller is better.
        evaluations: how many.
        min_delta_frac: a new best counts only where it is better by more than this share of the old one.
    """
    best, at = math.inf, 0
    for place, cost in enumerate(costs):
        margin = min_delta_frac * abs(best) if math.isfinite(best) else 0.0
        if cost < best - margin:
            best, at = float(cost), place
        elif place - at >= evaluations:
            return place
    return None


def generalisation_loss(costs: Floats, *, percent: float) -> int | None:
    """Stop when the cost is so many percent above the lowest so far; never where the lowest is not above 0."""
    lowest = math.inf
    for place, cost in enumerate(costs):
        lowest = min(lowest, cost) if math.isfinite(cost) else lowest
        if 0 < lowest < math.inf and 100.0 * (cost / lowest - 1.0) > percent:
            return place
    return None


def successive_rises(costs: Floats, *, rises: int) -> int | None:
    """Stop when the cost has risen from one evaluation to the next so many times in a row."""
    count = 0
    for place in range(1, costs.size):
        count = count + 1 if costs[place] > costs[place - 1] else 0
        if count == rises:
            return place
    return None


def twice_as_long(costs: Floats, *, start: int) -> int | None:
    """Stop when twice as many evaluations have gone by as until the best, and at least `start`."""
    at, best = 0, math.inf
    for place, cost in enumerate(costs):
        if cost < best:
            best, at = float(cost), place
        elif place >= max(start, 2 * at):
            return place
    return None


def patience_rule(evaluations: int) -> StoppingRule:
    """Return the rule that stops after so many evaluations in a row without a new best."""
    return StoppingRule(f"patience {evaluations}", "rule of thumb", partial(patience, evaluations=evaluations))


RULES: tuple[StoppingRule, ...] = (
    patience_rule(1),
    patience_rule(3),
    patience_rule(10),
    StoppingRule("patience 3, by 1 %", "rule of thumb", partial(patience, evaluations=3, min_delta_frac=0.01)),
    StoppingRule("GL 2", "Prechelt 1998", partial(generalisation_loss, percent=2.0)),
    StoppingRule("GL 5", "Prechelt 1998", partial(generalisation_loss, percent=5.0)),
    StoppingRule("UP 3", "Prechelt 1998", partial(successive_rises, rises=3)),
    StoppingRule("twice as long", "after Bengio 2012, arXiv:1206.5533", partial(twice_as_long, start=5)),
)
"""GL and UP with every evaluation as the end of a strip; patience counts evaluations."""


def early_stopping(record: RecordLike) -> pd.DataFrame:
    """Replay every rule on the recorded runs, and hold what it keeps against the best of the full budget (P4.6).

    A rule keeps the best checkpoint up to where it stops, so on the split that is watched it can lose and never win. What it loses
    on the test split is worth more: there the full budget has no such advantage.

    Args:
        record: a study with finished runs, each evaluated at least a few times.

    Returns:
        One row a rule: rule, source, runs, stopped (how many it cut short), steps_saved (mean share of the budget), lost (mean, in
        units of the metric, positive is worse), lost_frac and worst_lost_frac (of what the run had learned), test_lost (mean;
        NaN where the test split was not evaluated).
    """
    return pd.DataFrame(replay_rules(read_runs(record)), columns=COLUMNS)


def replay_rules(runs: Sequence[SelectedRun]) -> list[dict[str, Any]]:
    """Return the rows of `early_stopping` for these runs; none where none can be judged."""
    judged = [run for run in runs if run.judged]
    return [replay_rule(rule, judged) for rule in RULES] if judged else []


def replay_rule(rule: StoppingRule, runs: Sequence[SelectedRun]) -> dict[str, Any]:
    """Return the row of one rule: means over the runs, each of which can be judged."""
    stops = [rule.stop(run.costs) for run in runs]
    replayed = [_replay(run, stop) for run, stop in zip(runs, stops, strict=True)]
    saved, lost, share, tested = (np.array(column, dtype=np.float64) for column in zip(*replayed, strict=True))
    return {
        "rule": rule.name,
        "source": rule.source,
        "runs": len(runs),
        "stopped": int((saved > 0).sum()),
        "steps_saved": float(saved.mean()),
        "lost": float(lost.mean()),
        "lost_frac": float(share.mean()),
        "worst_lost_frac": float(share.max()),
        "test_lost": float(tested.mean()),
    }


def replay(run: SelectedRun, stop: int | None) -> tuple[int | None, float, float]:
    """Return the evaluation that is kept, the share of steps saved, and what is lost over what was learned.

    Args:
        run: one that can be judged.
        stop: place of the evaluation at which it is stopped; None is the end of the run.
    """
    end = run.costs.size - 1 if stop is None else stop
    seen = run.costs[: end + 1]
    if not np.isfinite(seen).any():
        return None, float(1 - run.steps[end] / run.total_steps), math.inf
    kept = int(np.nanargmin(np.where(np.isfinite(seen), seen, np.nan)))
    share = float(run.costs[kept] - run.costs[run.best]) / run.learned if run.learned > 0 else 0.0
    return kept, float(1.0 - run.steps[end] / run.total_steps) if stop is not None else 0.0, share


def _replay(run: SelectedRun, stop: int | None) -> tuple[float, float, float, float]:
    """Return the share of steps saved, what is lost, the same over what was learned, and what is lost on the test split."""
    kept, saved, share = replay(run, stop)
    if kept is None:
        return saved, math.inf, math.inf, math.nan
    lost = float(run.costs[kept] - run.costs[run.best])
    return saved, lost, share, float(run.test_costs[kept] - run.test_costs[run.best])
