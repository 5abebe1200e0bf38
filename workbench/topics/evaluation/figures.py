"""Periodic against offline metric, evaluations by steps and by seconds; what a sample can show and costs, and recall in counts."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from workbench.curves.selection import metric_sign
from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import finding, trials_in
from workbench.plots.palette import BAD, BASELINE, GOOD, INK, PALETTE
from workbench.plots.style import Size, drawing, legend, log_scale, not_measured, short
from workbench.record.json_values import number
from workbench.record.read import periodic_rows
from workbench.topics.evaluation.diagnose import diagnose_evaluation
from workbench.topics.evaluation.proxy import paired_checkpoints
from workbench.topics.evaluation.sample_size import evaluation_sizes


def _floats(table: pd.DataFrame, column: str) -> NDArray[np.float64]:
    return table[column].to_numpy(dtype=np.float64, na_value=np.nan)


def plot_evaluation(
    record: Record,
    diagnosis: Diagnosis | None = None,
    *,
    offline_split: str | None = None,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw the periodic metric of every checkpoint against the offline one.

    Healthy: the points rise together, and the checkpoint that the periodic metric picks is the best one offline or close to it.
    Sick: the points form a cloud, or fall; what is picked then lies far from the best.

    Source: P2.4 (rank correlation over all checkpoints), P4.5 (what is picked).
    """
    with drawing(ax, size, (5.4, 4.2)) as axes:
        metric = str(record.config["select"]).partition("/")[2]
        pairs = paired_checkpoints(record, offline_split=offline_split)
        pairs = pairs[np.isfinite(pairs["periodic"].astype(float)) & np.isfinite(pairs["offline"].astype(float))]
        if pairs.empty:
            return not_measured(axes, "no checkpoint was evaluated both periodically and offline")
        found = finding(diagnosis or diagnose_evaluation(record, offline_split=offline_split), "evaluation.bad_proxy")
        value = number(None if found is None else found.value)
        said = "not measured" if np.isnan(value) else f"{value:.2f}"
        x, y, steps = _floats(pairs, "periodic"), _floats(pairs, "offline"), pairs["step"].astype(int).tolist()
        picked, best = (int(np.argmin(metric_sign(record) * values)) for values in (x, y))
        axes.set(xlabel=f"periodic {metric}", ylabel=f"offline {metric}", title=f"Rank correlation {said}")
        axes.plot(x, y, "o", color=GOOD, markersize=5, alpha=0.7, label=f"checkpoints ({len(x)})")
        axes.plot(x[best], y[best], "*", color=INK, markersize=13, label=f"best offline: step {steps[best]}")
        axes.plot(
            x[picked], y[picked], "s", color=BAD, markersize=11, fillstyle="none", markeredgewidth=1.6,
            label=f"picked by the proxy: step {steps[picked]}",
        )  # fmt: skip
        for name, values in (("x", x), ("y", y)):
            if values.min() > 0 and values.max() > 5 * values.min():
                log_scale(axes, name)
        legend(axes)
    return axes


def plot_timed_evaluations(record: Record, *, size: Size = "page", ax: Axes | None = None) -> Axes:
    """Draw where evaluations fall, by steps and by seconds, in a run and in the same run with a pause.

    Healthy: by steps both rows of marks are the same, so curves can be compared point by point. Sick: by seconds the marks after the
    pause are shifted. Seconds are the recorded time of every step, at an interval that gives the run as many evaluations as by steps.

    Source: P2.8 (steps, never seconds).
    """
    with drawing(ax, size, (6.8, 2.8)) as axes:
        trials = trials_in(record, "evaluation")[:1] + trials_in(record, "evaluation_pause")[:1]
        rows = {t: record.steps[record.steps["trial"] == t].sort_values("step") for t in trials}
        if len(trials) < 2 or not all(_elapsed(frame).max(initial=0.0) > 0 for frame in rows.values()):
            return not_measured(axes, "the record has no trial with a pause (pause_s=...)")
        live = periodic_rows(record.evals)
        by_steps = {t: np.unique(live[(live["trial"] == t) & (live["step"] > 0)]["step"]) for t in trials}
        every_s = float(_elapsed(rows[trials[0]])[-1]) / max(1, len(by_steps[trials[0]]))
        for place, trial in enumerate(trials):
            for height, color, marker, steps, kind in (
                (3 - place, GOOD, "o", by_steps[trial], "fixed steps"),
                (1 - place, BAD, "x", _timed_steps(rows[trial], every_s), "fixed seconds"),
            ):
                y, label = np.full(len(steps), float(height)), None if place else kind
                axes.plot(steps, y, linestyle="none", marker=marker, color=color, label=label)
        names = [f"by {by}, {pause} a pause" for by in ("steps", "seconds") for pause in ("without", "with")]
        axes.set_yticks([3, 2, 1, 0], names)
        axes.set(xlabel="step of an evaluation", ylabel="evaluations", ylim=(-0.5, 4.1))
        axes.set_title("Evaluate by steps, not by seconds")
        legend(axes)
    return axes


def plot_evaluation_sample(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw the smallest difference that shows, and the seconds of an evaluation (along the top), against the size of the sample.

    Left of a kink the sample is so small that a difference shows only where all examples on which two models disagree speak for the same one.

    Healthy: a shaded band, the sizes that show the smallest difference of interest within the time budget, with the taken size in it.
    Sick: no band; the curve meets the dashed line only right of the dotted one, beyond what the budget allows or the set holds.

    Source: P3.1, P3.3, P3.4, P3.5.
    """
    with drawing(ax, size, (7.2, 4.6)) as axes:
        found = finding(diagnosis, "evaluation.too_small")
        evidence = {} if found is None else found.evidence
        comparisons = int(evidence.get("comparisons") or 100)
        table = evaluation_sizes(record, comparisons=comparisons)
        if table.empty or not np.isfinite(_floats(table, "detectable")).any():
            return not_measured(axes, "no two models were evaluated on the validation set")
        facts, x = record.facts["evaluation_sample"], _floats(table, "examples")
        for column, label, color, style in (
            ("detectable", "difference that shows, same examples", PALETTE[0], "-"),
            ("unpaired", "difference that shows, different examples", PALETTE[4], "--"),
            ("selection_gap", f"how much the best of {comparisons} equal models flatters itself", PALETTE[6], "-."),
        ):
            y = _floats(table, column)
            seen = np.isfinite(y) & (y > 0)
            if seen.any():
                axes.plot(x[seen], y[seen], color=color, linestyle=style, label=label)
        log_scale(axes, "x", "y")
        _mark_bounds(axes, number((facts.get("asked") or {}).get("smallest_difference")), evidence)
        seconds = _floats(table, "seconds")
        if np.isfinite(seconds).all():  # they grow with the examples, so each size has its own
            slope = (seconds[-1] - seconds[0]) / (x[-1] - x[0])
            start = seconds[0] - slope * x[0]
            top = axes.secondary_xaxis("top", functions=(lambda n: start + slope * n, lambda s: (s - start) / slope))
            top.xaxis.set_major_formatter(FuncFormatter(lambda s, _: short(s)))
            top.xaxis.set_minor_formatter(NullFormatter())
            top.set_xlabel("seconds of one evaluation")
        axes.set(xlabel="examples in the sample", ylabel=f"difference in {facts['metric']}")
        axes.set_title("How large a sample: what it shows and what it costs")
        legend(axes)
    return axes


def _mark_bounds(ax: Axes, wanted: float, evidence: Mapping[str, Any]) -> None:
    names = ("available", "largest", "smallest", "size", "detectable")
    available, largest, smallest, size, detectable = (number(evidence.get(name)) for name in names)
    if np.isfinite(wanted):
        ax.axhline(wanted, color=BASELINE, linestyle="--", label=f"smallest difference of interest: {short(wanted)}")
    top = np.fmin(available, largest)
    if np.isfinite(top) and top > 0:
        what = "the time budget allows" if largest < available else "the set holds"
        ax.axvline(top, color=BAD, linestyle=":", label=f"largest: {top:,.0f}, what {what}")
        if smallest <= top:
            label = f"both bounds kept: {smallest:,.0f} to {top:,.0f}"
            ax.axvspan(smallest, top, color=GOOD, alpha=0.15, linewidth=0, label=label)
    if np.isfinite(size):
        label = f"the sample: {size:,.0f} examples, {short(detectable)}"
        ax.plot([size], [detectable], marker="o", linestyle="none", color=PALETTE[0], markersize=7, label=label)


def _timed_steps(steps: pd.DataFrame, every_s: float) -> list[int]:
    """Return the steps at which an evaluation every `every_s` seconds of training would come; a longer pause gives one, not several."""
    elapsed = _elapsed(steps)
    if not elapsed.size or not every_s > 0:
        return []
    new = np.flatnonzero(np.diff(np.floor(elapsed / every_s).astype(np.int64), prepend=0) > 0)
    return [int(step) for step in steps["step"].to_numpy()[new]]


def _elapsed(steps: pd.DataFrame) -> NDArray[np.float64]:
    """Return the time since the beginning at each step of one trial, evaluation left out."""
    return np.cumsum(np.nan_to_num(_floats(steps, "step_time_s"))) if "step_time_s" in steps else np.empty(0)
