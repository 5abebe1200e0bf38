"""`read_runs`: what selection saw of each run: its evaluations, the best of them, the last, and the test split beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from workbench.curves.judged_runs import trials_with
from workbench.curves.trials import RecordLike
from workbench.errors import ConfigError
from workbench.record.read import select_best
from workbench.record.roles import Role

__all__ = ["SelectedRun", "read_runs"]


FEWEST_TO_SEE_NOISE = 4
"""Evaluations; fewer have less than two second differences."""


@lru_cache(maxsize=256)
def expected_maximum(draws: int) -> float:
    """Return the mean of the largest of `draws` independent standard normal draws.

    The integral of x d(Phi(x) ** draws): 0 for one draw, 1/sqrt(pi) for two, 1.54 for ten, 2.51 for a hundred.

    Args:
        draws: at least 1.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(draws, bool) or not isinstance(draws, (int, np.integer)) or draws < 1:
        raise ConfigError(f"draws={draws!r} must be an integer of at least 1.")
    x = np.linspace(-12.0, 12.0, 4001)
    density = draws * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * ndtr(x) ** (draws - 1)
    return float(np.trapezoid(x * density, x))


def wobble(values: NDArray[np.float64]) -> float:
    """Return a metric's standard deviation from evaluation to evaluation, free of its trend: MAD of its second differences.

    Args:
        values: finite, in order of the steps; 0.0 where they are too few to tell.
    """
    if values.size < FEWEST_TO_SEE_NOISE:
        return 0.0
    return float(1.4826 * np.median(np.abs(np.diff(values, n=2))) / math.sqrt(6.0))


Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SelectedRun:
    """The evaluations of one finished run; costs are what is smaller when it is better, whatever the metric.

    Attributes:
        trial: its number.
        seed: shared seed.
        total_steps: its length.
        steps: at which it was evaluated, shape (evaluations,).
        costs: what selection compares, NaN and inf kept, shape (evaluations,).
        test_costs: the same metric on the test split, NaN where it was not measured, shape (evaluations,).
    """

    trial: int
    seed: int
    total_steps: int
    steps: Steps
    costs: Floats
    test_costs: Floats

    @property
    def finite(self) -> Floats:
        """The costs that selection can choose from."""
        return self.costs[np.isfinite(self.costs)]

    @property
    def judged(self) -> bool:
        """Whether there are enough finite evaluations to see their noise."""
        return self.finite.size >= FEWEST_TO_SEE_NOISE

    @property
    def best(self) -> int:
        """Place of the selected evaluation: the earliest of the best; -1 where none is finite (P4.5)."""
        found = select_best(list(range(self.costs.size)), self.costs.tolist(), mode="min")
        return -1 if found is None else found[0]

    @property
    def best_frac(self) -> float:
        """Step of the best checkpoint as a share of the run."""
        return float(self.steps[self.best] / self.total_steps) if self.best >= 0 else math.nan

    @property
    def gain(self) -> float:
        """What the best checkpoint is better than the last by; inf where the last is not finite."""
        last = self.costs[-1]
        return float(last - self.costs[self.best]) if np.isfinite(last) else math.inf

    @property
    def test_gain(self) -> float:
        """The same on the test split, which had no part in choosing; NaN where it was not measured."""
        return float(self.test_costs[-1] - self.test_costs[self.best])

    @property
    def learned(self) -> float:
        """What training won from its first evaluation to its best."""
        return float(self.finite[0] - self.finite.min())

    @property
    def noise(self) -> float:
        """Standard deviation from evaluation to evaluation."""
        return wobble(self.finite)

    @property
    def contenders(self) -> NDArray[np.bool_]:
        """Evaluations that noise alone might have made the best: within the range that so many draws have, shape (evaluations,)."""
        reach = 2.0 * expected_maximum(self.finite.size) * self.noise
        near: NDArray[np.bool_] = self.costs <= self.costs[self.best] + reach
        return near & np.isfinite(self.costs)

    @property
    def luck(self) -> float:
        """What the selected value is expected to look better by than it is: the best of so many noisy draws."""
        return expected_maximum(int(self.contenders.sum())) * self.noise

    @property
    def carried(self) -> tuple[float, float]:
        """The lead of the selected checkpoint over the mean of the contenders: on the split that chose it, and on the test split."""
        rivals = self.contenders
        leads = (float(costs[rivals].mean() - costs[self.best]) for costs in (self.costs, self.test_costs))
        first, second = leads
        return first, second


def read_runs(record: RecordLike) -> list[SelectedRun]:
    """Return the finished runs whose selection is judged.

    These are the trials of the stage "checkpoints"; without any, those of the study's own config under every seed; without any,
    all. A run that diverged, failed or was stopped is none: its last checkpoint is no result of training.

    Args:
        record: a study or a single trial.
    """
    table = record.trials
    if not len(table) or "select" not in record.config:
        return []
    done = table[table["state"] == "complete"]
    asked = done["trial"][done["stage"] == Role.CHECKPOINTS].tolist()
    known = [n for n in record.config if n in table]
    own = trials_with(record, {n: record.config[n] for n in known}) if not asked else []
    wanted = asked or [n for n in own if n in set(done["trial"])] or done["trial"].tolist()
    rows = {int(row["trial"]): row for row in done.to_dict("records")}
    runs = [_run(record, int(n), rows[int(n)]["seed"], int(rows[int(n)]["total_steps"])) for n in wanted]
    return [run for run in runs if run.steps.size]


def _run(record: RecordLike, trial: int, seed: int, total_steps: int) -> SelectedRun:
    split, metric = str(record.config["select"]).split("/", 1)
    sign = 1.0 if record.config["select_mode"] == "min" else -1.0
    evals = record.evals
    rows = evals[(evals["trial"] == trial) & (evals["metric"] == metric)]
    ours = rows[rows["split"] == split].drop_duplicates("step", keep="last").sort_values("step")
    tested = rows[rows["split"] == "test"].drop_duplicates("step", keep="last").set_index("step")["value"]
    on_test = tested if split != "test" else tested.iloc[:0]
    steps = ours["step"].to_numpy(dtype=np.int64)
    return SelectedRun(
        trial=trial,
        seed=int(seed),
        total_steps=total_steps,
        steps=steps,
        costs=sign * ours["value"].to_numpy(dtype=np.float64, na_value=np.nan),
        test_costs=sign * on_test.reindex(steps).to_numpy(dtype=np.float64, na_value=np.nan),
    )
