"""Periodic against offline metric, checkpoint by checkpoint; and evaluations by steps against evaluations by seconds."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from workbench.findings.diagnosis import Diagnosis
from workbench.findings.timed import timed_steps, trial_seconds
from workbench.plots.frames import Record, finding, trials_in
from workbench.plots.style import BAD, GOOD, INK, drawing, legend, log_scale, not_measured, number
from workbench.record.read import periodic_rows
from workbench.topics.evaluation.diagnose import diagnose_evaluation
from workbench.topics.evaluation.proxy import paired_checkpoints

__all__ = ["plot_evaluation", "plot_timed_evaluations"]


def plot_evaluation(
    record: Record, diagnosis: Diagnosis | None = None, *, offline_split: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the periodic metric of every checkpoint against the offline one.

    Healthy: the points rise together, and the checkpoint that the periodic metric picks is the best one offline or close to it.
    Sick: the points form a cloud, or fall; what is picked then lies far from the best.

    Args:
        record: a study whose checkpoints were evaluated offline.
        diagnosis: its `evaluation.bad_proxy` gives the correlation; made from the record without it.
        offline_split: whose offline rows; None is the split that selection compares.
        ax: where to draw; a new figure by default.

    Source: P2.4 (rank correlation over all checkpoints), P4.5 (what is picked).
    """
    with drawing(ax, size=(5.4, 4.2)) as axes:
        split, metric = str(record.config["select"]).split("/", 1)
        pairs = paired_checkpoints(record, metric=metric, split=split, offline_split=offline_split)
        pairs = pairs[np.isfinite(pairs["periodic"].astype(float)) & np.isfinite(pairs["offline"].astype(float))]
        if pairs.empty:
            return not_measured(axes, "no checkpoint was evaluated both periodically and offline")
        if diagnosis is None:
            diagnosis = diagnose_evaluation(record, offline_split=offline_split)
        found = finding(diagnosis, "evaluation.bad_proxy")
        value = number(None if found is None else found.value)
        said = "not measured" if np.isnan(value) else f"{value:.2f}"
        x, y = pairs["periodic"].to_numpy(dtype=float), pairs["offline"].to_numpy(dtype=float)
        sign = 1.0 if record.config["select_mode"] == "min" else -1.0
        picked, best = int(np.argmin(sign * x)), int(np.argmin(sign * y))
        axes.set(xlabel=f"periodic {metric}", ylabel=f"offline {metric}", title=f"Rank correlation {said}")
        axes.plot(x, y, "o", color=GOOD, markersize=5, alpha=0.7, label=f"checkpoints ({len(x)})")
        axes.plot(
            x[best], y[best], "*", color=INK, markersize=13, label=f"best offline: step {int(pairs['step'].iloc[best])}"
        )
        label = f"picked by the proxy: step {int(pairs['step'].iloc[picked])}"
        axes.plot(
            x[picked], y[picked], "s", color=BAD, markersize=11, fillstyle="none", markeredgewidth=1.6, label=label
        )
        for name, values in (("x", x), ("y", y)):
            if values.min() > 0 and values.max() > 5 * values.min():
                log_scale(axes, name)
        legend(axes)
    return axes


def plot_timed_evaluations(record: Record, *, ax: Axes | None = None) -> Axes:
    """Draw where evaluations fall, by steps and by seconds, in a run and in the same run with a pause.

    Healthy: by steps both rows of marks are the same, so curves can be compared point by point.
    Sick: by seconds the marks after the pause are shifted, and no two runs have theirs at the same steps.

    Args:
        record: a study of `EvaluationStudy(pause_s=...)`.
        ax: where to draw; a new figure by default.

    Source: P2.8 (steps, never seconds). By seconds is computed from the recorded time of every step, for an interval that
    gives the run without the pause as many evaluations as it has by steps.
    """
    with drawing(ax, size=(6.8, 2.8)) as axes:
        trials = trials_in(record, "evaluation")[:1] + trials_in(record, "evaluation_pause")[:1]
        rows = {t: record.steps[record.steps["trial"] == t].sort_values("step") for t in trials}
        if len(trials) < 2 or not all(trial_seconds(frame) > 0 for frame in rows.values()):
            return not_measured(axes, "the record has no trial with a pause (pause_s=...)")
        live = periodic_rows(record.evals)
        by_steps = {t: np.unique(live[(live["trial"] == t) & (live["step"] > 0)]["step"]) for t in trials}
        every_s = trial_seconds(rows[trials[0]]) / max(1, len(by_steps[trials[0]]))
        names = ("without a pause", "with a pause")
        for place, trial in enumerate(trials):
            for shift, color, marker, steps, kind in (
                (0.0, GOOD, "o", by_steps[trial], "fixed steps"),
                (2.0, BAD, "x", timed_steps(rows[trial], every_s), "fixed seconds"),
            ):
                height = np.full(len(steps), 3 - shift - place)
                axes.plot(
                    steps, height, linestyle="none", marker=marker, color=color, label=kind if place == 0 else None
                )
        axes.set_yticks(
            [3, 2, 1, 0],
            [f"by steps, {names[0]}", f"by steps, {names[1]}", f"by seconds, {names[0]}", f"by seconds, {names[1]}"],
        )
        axes.set(
            xlabel="step of an evaluation",
            ylabel="evaluations",
            ylim=(-0.5, 4.1),
            title="Evaluate by steps, not by seconds",
        )
        legend(axes, loc="upper center", ncols=2)
    return axes
