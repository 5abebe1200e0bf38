"""Runs held against each other by their selected checkpoints, not their last (P4.7, F3.12).

The best of many evaluations is better than the best of few, so runs that were evaluated more densely are thinned to the spacing
of the others, as a share of the run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtr

from workbench.curves.instability import ignorance
from workbench.curves.judged import trials_with
from workbench.curves.trial_curves import RecordLike
from workbench.errors import ConfigError
from workbench.record.read import periodic_rows, select_best
from workbench.record.roles import Role

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
FEWEST_TO_SEE_NOISE = 4  # evaluations; fewer have less than two second differences


@lru_cache(maxsize=256)
def expected_maximum(draws: int) -> float:
    """Return the mean of the largest of `draws` independent standard normal draws: the integral of x d(Phi(x) ** draws).

    0 for one draw, 1/sqrt(pi) for two, 1.54 for ten, 2.51 for a hundred.
    """
    if isinstance(draws, bool) or not isinstance(draws, (int, np.integer)) or draws < 1:
        raise ConfigError(f"draws={draws!r} must be an integer of at least 1.")
    x = np.linspace(-12.0, 12.0, 4001)
    density = draws * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * ndtr(x) ** (draws - 1)
    return float(np.trapezoid(x * density, x))


def wobble(values: Floats) -> float:
    """Return the standard deviation of finite values free of their trend: MAD of the second differences; 0.0 for too few."""
    if values.size < FEWEST_TO_SEE_NOISE:
        return 0.0
    return float(1.4826 * np.median(np.abs(np.diff(values, n=2))) / math.sqrt(6.0))


def metric_sign(record: RecordLike) -> float:
    """Return 1 where a smaller selected metric is the better one, else -1."""
    return 1.0 if record.config.get("select_mode", "min") == "min" else -1.0


def unlearned(record: RecordLike, first: float, chance: float | None) -> float:
    """Return the cost of knowing nothing: the selected metric at first or, where it is the training's own loss, chance if that is lower.

    A program's metrics may be on a scale of their own.
    """
    select = str(record.config["select"])
    own = select.endswith("/loss") and ("program" not in record.facts or select.startswith("train/"))
    return ignorance(metric_sign(record) * first, chance if own else None)


def ended_early(record: RecordLike) -> pd.DataFrame:
    """Return the trials of programs that ended themselves before the planned updates, as by an early stopping of their own."""
    trials = record.trials
    if trials.empty:
        return trials
    return trials[(trials["state"] == "complete") & (trials["steps_run"] < trials["total_steps"])]


def selected_rows(record: RecordLike, trial: int) -> pd.DataFrame:
    """Return the evaluations of a trial by the selected metric that training wrote itself."""
    split, _, metric = str(record.config["select"]).partition("/")
    evals = periodic_rows(record.evals)
    return evals[(evals["trial"] == trial) & (evals["split"] == split) & (evals["metric"] == metric)]


@dataclass(frozen=True, kw_only=True)
class SelectedRun:
    """The evaluations of one finished run; costs are what is smaller when it is better, whatever the metric."""

    trial: int
    seed: int
    total_steps: int
    steps: Steps
    costs: Floats  # what selection compares at each of the `steps`, NaN and inf kept, shape (evaluations,)
    test_costs: Floats  # the same metric on the test split, NaN where it was not measured, shape (evaluations,)

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
        """What the selected value, the best of so many noisy draws, is expected to look better by than it is."""
        return expected_maximum(int(self.contenders.sum())) * self.noise

    @property
    def carried(self) -> tuple[float, float]:
        """The lead of the selected checkpoint over the mean of the contenders, on the split that chose it and on the test split."""
        first, second = (float(c[self.contenders].mean() - c[self.best]) for c in (self.costs, self.test_costs))
        return first, second


def read_runs(record: RecordLike, trials: Sequence[int] = ()) -> list[SelectedRun]:
    """Return the finished runs whose selection is judged.

    These are the `trials`; without any, those of the role "checkpoints", of the study's own config under every seed, or
    all. A run that diverged, failed or was stopped is none: its last checkpoint is no result of training.
    """
    table = record.trials
    if not len(table) or "select" not in record.config:
        return []
    done = table[table["state"] == "complete"]
    wanted = [n for n in done["trial"] if n in trials] or done["trial"][done["stage"] == Role.CHECKPOINTS].tolist()
    if not wanted:
        own = trials_with(record, {n: record.config[n] for n in record.config if n in table})
        wanted = [n for n in own if n in set(done["trial"])] or done["trial"].tolist()
    split, metric = str(record.config["select"]).split("/", 1)
    sign, evals = metric_sign(record), record.evals
    runs = []
    for row in (done[done["trial"] == trial].iloc[0] for trial in wanted):
        rows = evals[(evals["trial"] == row["trial"]) & (evals["metric"] == metric)]
        ours = rows[rows["split"] == split].drop_duplicates("step", keep="last").sort_values("step")
        tested = rows[rows["split"] == "test"].drop_duplicates("step", keep="last").set_index("step")["value"]
        on_test = tested if split != "test" else tested.iloc[:0]
        steps = ours["step"].to_numpy(dtype=np.int64)
        runs.append(SelectedRun(
            trial=int(row["trial"]), seed=int(row["seed"]), total_steps=int(row["total_steps"]), steps=steps,
            costs=sign * ours["value"].to_numpy(dtype=np.float64, na_value=np.nan),
            test_costs=sign * on_test.reindex(steps).to_numpy(dtype=np.float64, na_value=np.nan),
        ))  # fmt: skip
    return [run for run in runs if run.steps.size]


def compare_selected(
    record: RecordLike, *, baseline: Sequence[int], candidates: Mapping[str, Sequence[int]], noise_sds: float = 2.0
) -> dict[str, Any]:
    """Compare the baseline with the best of some candidates by the selected metric of their best checkpoints.

    The noise is that of the candidate's metric from evaluation to evaluation, free of its trend; with several seeds also
    their spread. The baseline's own noise raises no bar: its selected checkpoint is its best moment already, and an
    unstable baseline would protect itself. The best candidate is the one whose metric is best with its noise counted
    against it, not the one with the luckiest evaluation.

    Args:
        noise_sds: how many standard deviations the gain has to be (rule of thumb).

    Returns:
        baseline and recommended results (see `selected`), candidate (its name or None), gain, noise, learned (what the better
        of the two gained on the untrained model, None where that was not evaluated), promising (better by more than the noise
        as far as that is known), adopted, said (the numbers), why (it is not, or ""), reason (both).
    """
    select, sign = str(record.config["select"]), metric_sign(record)
    every = spacing(record, [*baseline, *(number for numbers in candidates.values() for number in numbers)])
    ours = selected(record, baseline, every=every)
    found = {name: result for name, numbers in candidates.items() if (result := selected(record, numbers, every=every))}
    if not ours or not found:
        why = "no other lr is better by enough to matter, and nothing else was tried"
        why = why if ours else "there is no finite value of the baseline"
        none = {"candidate": None, "promising": False, "adopted": False, "said": "", "why": why}
        return {"baseline": ours, "recommended": ours, **none, "reason": f"Not adopted: {why}."}
    name = min(found, key=lambda n: sign * found[n][select] + noise_sds * found[n]["noise"])
    theirs = found[name]
    gain, noise = sign * (ours[select] - theirs[select]), noise_sds * theirs["noise"]
    promising = bool(gain > noise)
    adopted = promising and theirs["noise_known"]
    why = "" if adopted else "not better by more than the noise"
    if promising and not adopted:
        why = "a single run with too few evaluations does not show its noise"
    known = f"noise {noise:.2g}" if noise > 0 else "noise not measured (too few evaluations)"
    by = f"{'better' if gain > 0 else 'worse'} by {abs(gain):.2g}, {known}" if gain != 0 else "equally good"
    said = (
        f"Selected checkpoints: {select} {ours[select]:.4g} at step {ours['best_step']} (baseline), {theirs[select]:.4g} "
        f"at step {theirs['best_step']} ({name}): {by}."
    )
    starts = list(starts_by_seed(record, [*ours["trials"], *theirs["trials"]]).values())
    best = sign * min(sign * ours[select], sign * theirs[select])
    return {
        "baseline": ours, "recommended": theirs, "candidate": name, "gain": gain, "noise": noise,
        "learned": sign * (float(np.mean(starts)) - best) if starts else None, "promising": promising, "adopted": adopted, "said": said,
        "why": why, "reason": f"{said} Not adopted: {why}." if why else f"{said} Adopted.",
    }  # fmt: skip


def selected_by_seed(record: RecordLike, numbers: Sequence[int], *, every: float = 0.0) -> dict[int, float]:
    """Return for each seed the selected metric of its trial's best checkpoint, where there is a finite one; for `every` see `spacing`."""
    found = {seed: selectable(record, n, every)[0] for seed, n in _seeds(record, numbers).items()}
    sign = metric_sign(record)
    return {seed: float((sign * values).min() * sign) for seed, values in found.items() if values.size}


def starts_by_seed(record: RecordLike, numbers: Sequence[int]) -> dict[int, float]:
    """Return for each seed what the selected metric is where nothing is known: untrained, or by guessing where that is better."""
    chance = record.facts.get("chance_loss") if str(record.config["select"]).endswith("/loss") else None
    first = {seed: selectable(record, n) for seed, n in _seeds(record, numbers).items()}
    return {seed: ignorance(float(v[0]), chance) for seed, (v, steps) in first.items() if steps.size and not steps[0]}


def spacing(record: RecordLike, numbers: Sequence[int]) -> float:
    """Return the largest mean distance between evaluations among some trials, as a share of the run; 0.0 where none has two."""
    found = [_shares(record, number)[0] for number in numbers]
    return max((float(np.mean(np.diff(shares))) for shares in found if shares.size > 1), default=0.0)


def _seeds(record: RecordLike, numbers: Sequence[int]) -> dict[int, int]:
    seeds = dict(zip(record.trials["trial"].tolist(), record.trials["seed"].tolist(), strict=True))
    return {int(seeds[number]): int(number) for number in numbers}


def _shares(record: RecordLike, number: int) -> tuple[Floats, pd.DataFrame]:
    """Return where in its run a trial was evaluated by the selected metric, from 0 to 1, and the rows."""
    rows, trials = selected_rows(record, number), record.trials
    total = float(trials.loc[trials["trial"] == number, "total_steps"].iloc[0])
    return rows["step"].to_numpy(dtype=np.float64) / total, rows


def selectable(record: RecordLike, number: int, every: float = 0.0) -> tuple[Floats, Steps]:
    """Return the finite values that selection compares for one trial, and their steps, thinned to the spacing `every`."""
    shares, rows = _shares(record, number)
    if every > 0 and shares.size > 1 and np.mean(np.diff(shares)) < every * (1 - 1e-3):
        marks = np.append(np.arange(0.0, 1.0 - every / 2, every), 1.0)
        nearest = np.abs(shares[:, None] - marks).argmin(0)
        rows = rows.iloc[np.unique(nearest[np.abs(shares[nearest] - marks) <= every / 2])]
    rows = rows[np.isfinite(rows["value"].to_numpy(dtype=np.float64))]
    return rows["value"].to_numpy(dtype=np.float64), rows["step"].to_numpy(dtype=np.int64)


def selected(record: RecordLike, numbers: Sequence[int], *, every: float = 0.0) -> dict[str, Any]:
    """Return best_step, the selected metric (mean over the trials, one a seed), noise (and whether it is known), seeds and trials."""
    sign = metric_sign(record)
    runs = [run for number in numbers if (run := selectable(record, number, every))[0].size]
    if not runs:
        return {}
    at = [int(np.argmin(sign * values)) for values, _ in runs]
    best = [float(values[k]) for k, (values, _) in zip(at, runs, strict=True)]
    with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges, it has no end
        spread = float(np.std(best, ddof=1)) if len(best) > 1 else 0.0
    return {
        "best_step": int(runs[0][1][at[0]]), str(record.config["select"]): float(np.mean(best)),
        "noise": max(float(np.mean([wobble(values) for values, _ in runs])), spread),
        "noise_known": all(values.size >= FEWEST_TO_SEE_NOISE for values, _ in runs) or len(best) > 1,
        "seeds": len(best), "trials": [int(n) for n in numbers],
    }  # fmt: skip
