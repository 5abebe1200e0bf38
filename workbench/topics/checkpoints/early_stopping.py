"""Early-stopping rules, by name, replayed on recorded curves: what each would have kept, and what it would have saved (P4.6)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.curves.selection import SelectedRun, read_runs
from workbench.curves.trial_curves import RecordLike

Floats = NDArray[np.float64]
COLUMNS = ["rule", "source", "runs", "stopped", "steps_saved", "lost", "lost_frac", "worst_lost_frac", "test_lost"]


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
    places, lowest = np.arange(costs.size), np.minimum.accumulate(np.where(np.isfinite(costs), costs, np.inf))
    best = np.maximum.accumulate(np.where(costs < np.append(np.inf, lowest[:-1]), places, 0))
    late = np.flatnonzero((places > best) & (places >= np.maximum(start, 2 * best)))
    return int(late[0]) if late.size else None


RULES: tuple[tuple[str, str, Callable[[Floats], int | None]], ...] = (
    *((f"patience {n}", "rule of thumb", partial(_patience, evaluations=n)) for n in (1, 3, 10)),
    ("patience 3, by 1 %", "rule of thumb", partial(_patience, evaluations=3, min_delta_frac=0.01)),
    ("GL 2", "Prechelt 1998", partial(_generalisation_loss, percent=2.0)),
    ("GL 5", "Prechelt 1998", partial(_generalisation_loss, percent=5.0)),
    ("UP 3", "Prechelt 1998", partial(_successive_rises, rises=3)),
    ("twice as long", "after Bengio 2012, arXiv:1206.5533", partial(_twice_as_long, start=5)),
)
"""Name, source, and costs in order (smaller is better, NaN allowed) -> place of the evaluation that it stops at, None for never.

GL and UP with every evaluation as the end of a strip; patience counts evaluations.
"""


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
    judged, rows = [run for run in runs if run.judged], []
    for name, source, stop in RULES if judged else ():
        saves, losses, shares, tested = np.array([_replay(run, stop(run.costs)) for run in judged]).T
        rows.append({
            "rule": name, "source": source, "runs": len(judged), "stopped": int((saves > 0).sum()),
            "steps_saved": float(saves.mean()), "lost": float(losses.mean()), "lost_frac": float(shares.mean()),
            "worst_lost_frac": float(shares.max()), "test_lost": float(tested.mean()),
        })  # fmt: skip
    return rows


def _replay(run: SelectedRun, stop: int | None) -> tuple[float, float, float, float]:
    """Return the share of steps saved by stopping at an evaluation, and what is lost: as it is, over what was learned, and on the test split."""
    end = run.costs.size - 1 if stop is None else stop
    saved = 0.0 if stop is None else float(1.0 - run.steps[end] / run.total_steps)
    seen = np.where(np.isfinite(run.costs), run.costs, np.inf)[: end + 1]
    kept = int(seen.argmin())
    if math.isinf(seen[kept]):
        return saved, math.inf, math.inf, math.nan
    lost, tested = (float(costs[kept] - costs[run.best]) for costs in (run.costs, run.test_costs))
    return saved, lost, lost / run.learned if run.learned > 0 else 0.0, tested
