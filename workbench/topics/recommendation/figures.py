"""The proof of a recommendation: each seed's selected checkpoint, baseline against candidate."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.style import BASELINE, GOOD, PALETTE, Size, drawing, legend, log_scale, not_measured, short
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.recommendation.diagnose import recommend


def plot_proof(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw the selected metric of every seed under the baseline and the candidate, one line a seed, with the means.

    Healthy: every line goes the same way, and the means lie further apart than the lines differ. Sick: the lines cross,
    so that another seed might have told another story; or the baseline of the candidate's length does as well as the
    candidate, so that only the length of the run has won.

    The proof is that of the diagnosis' recommendation, which is made from the record without one. Source: F3.12, P4.7.
    """
    with drawing(ax, size, (6.8, 3.6)) as axes:
        recommendation = (diagnosis.recommendation or {}) if diagnosis is not None else {}
        if diagnosis is None and len(record.trials) and "loss" in record.steps:
            recommendation = recommend(record, diagnose_lr_sweep(record))
        proof: dict[str, Any] = recommendation.get("proof") or {}
        if not proof.get("arms"):
            return not_measured(axes, "no candidate was held against the baseline over seeds")
        arms = [(str(arm["name"]), np.asarray(arm["values"], dtype=np.float64)) for arm in proof["arms"]]
        name = str(recommendation.get("candidate") or "candidate")
        arms.append((name, np.asarray(proof["candidate"], dtype=np.float64)))
        places = np.arange(len(arms))
        for k, seed in enumerate(proof["seeds"]):
            axes.plot(
                places, [values[k] for _, values in arms], "-o", color=PALETTE[1 + k % (len(PALETTE) - 1)], markersize=4,
                linewidth=1, label=f"seed {seed}",
            )  # fmt: skip
        for place, values in zip(places, (values for _, values in arms), strict=True):
            mean, color = float(values.mean()), GOOD if place == places[-1] else BASELINE
            axes.hlines(mean, place - 0.2, place + 0.2, color=color, linewidth=3, zorder=4)
            axes.annotate(
                short(mean), (place + 0.22, mean), va="center", color=color, fontweight="bold",
                annotation_clip=False,
            )  # fmt: skip
        axes.set_xticks(
            places, [name.replace(", ", ",\n").replace(" of the same", "\nof the same") for name, _ in arms]
        )
        axes.set_xlim(-0.4, places[-1] + 0.6)
        axes.set_ylabel(str(proof.get("select", "selected metric")), parse_math=False)
        axes.set_xlabel("config")
        axes.set_title(_title(recommendation, proof))
        if min(float(values.min()) for _, values in arms) > 0:
            log_scale(axes, "y")
        axes.margins(y=0.2)
        legend(axes)
    return axes


def _title(recommendation: Mapping[str, Any], proof: Mapping[str, Any]) -> str:
    if not proof.get("wins"):
        seeds = len(proof.get("seeds") or ())
        return f"Candidate against baseline, {seeds} seeds: not significantly better"
    examples = recommendation.get("examples") or {}
    if examples.get("refused"):
        return f"Better over seeds; with other examples than these {examples.get('examples')} perhaps not"
    return "Better over seeds" if recommendation.get("adopted") else "Better over seeds, and not adopted"
