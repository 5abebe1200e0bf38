"""Does gradient clipping help, and at which norm?"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.clipping import clipped_runs
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.plots.frames import curve, default_trial, part_measured
from workbench.plots.words import number_text
from workbench.topics.clipping.diagnose import CODES
from workbench.topics.clipping.diagnose import diagnose_clipping as diagnose
from workbench.topics.clipping.figures import plot_clipping as plot
from workbench.topics.clipping.figures import plot_grad_norm, plot_grad_norm_histogram

if TYPE_CHECKING:
    from workbench.topics.clipping.panel import clipping_panel as panel
    from workbench.topics.clipping.study import ClippingStudy as Study
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["Study", "diagnose", "panel", "plot", "plot_grad_norm", "plot_grad_norm_histogram"]


SPIKE = 10.0
"""Times the median of the ten norms on either side from which on the largest is called a spike (rule of thumb); a norm that drifts has none."""


def _norms(record: Any, trial: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the steps of a trial with a finite gradient norm, and the norms."""
    steps, norms = curve(record, trial, "grad_norm")
    return steps[np.isfinite(norms)], norms[np.isfinite(norms)]


def _norm_numbers(record: Any, diagnosis: Diagnosis) -> str:
    trial = default_trial(record, diagnosis)
    steps, norms = _norms(record, trial)
    peak = int(np.argmax(norms))
    middle, largest = number_text(float(np.median(norms))), number_text(float(norms[peak]))
    largest += f", at step {int(steps[peak]):,}"
    part = part_measured(record, trial, curve(record, trial, "grad_norm")[0])
    if part:
        return f"Trial {trial}: gradient norm in {part}; the largest of those is {largest}, their median {middle}."
    fifth = max(1, norms.size // 5)
    ends = [number_text(float(np.median(part))) for part in (norms[:fifth], norms[-fifth:])]
    said = f"Trial {trial}: the largest norm is {largest}; the median is {middle}, of the first fifth of the steps {ends[0]}, of the last {ends[1]}."
    spikes = " A single spike so far above the others is an outlier batch or the start of an instability."
    return said + spikes * bool(norms[peak] > SPIKE * np.median(norms[max(0, peak - 10) : peak + 11]))


def _histogram_numbers(record: Any, diagnosis: Diagnosis) -> str:
    trial = default_trial(record, diagnosis)
    _, norms = _norms(record, trial)
    low, high = (number_text(float(value)) for value in np.percentile(norms, (50, 90)))
    chosen = diagnosis["clipping.threshold"].value if "clipping.threshold" in diagnosis else None
    proposed = f"; the proposed clipping threshold is {number_text(chosen)}" if chosen is not None else ""
    return (
        f"Over the {norms.size:,} norms of trial {trial} the median is {low} and the 90th percentile {high}{proposed}."
    )


TOPIC = Topic(
    name="clipping",
    codes=CODES,
    figures=(
        Figure(
            name="grad-norm",
            shows="L2 norm of the gradient before clipping against step, of one run.",
            caption="Healthy is a band that drifts slowly.",
            codes=("clipping.threshold", "stability.spike"),
            draw=plot_grad_norm,
            numbers=_norm_numbers,
            alone=True,
        ),
        Figure(
            name="grad-norm-histogram",
            shows="Histogram of the gradient norms of one run.",
            caption="A good clipping threshold stands just right of the hump; to its left it would clip most steps and act as a "
            "lower learning rate.",
            codes=("clipping.threshold", "clipping.aggressive"),
            draw=plot_grad_norm_histogram,
            applies=lambda _, found: "loop.no_zero_grad" not in found or found["loop.no_zero_grad"].status != "fail",
            numbers=_histogram_numbers,
            alone=True,
        ),
        Figure(
            name="clipping",
            shows="Training loss at the end of each clipped run against its threshold, with the share of clipped steps.",
            caption="A good threshold clips about a tenth of the steps; hollow points clip half or more, which is an odd way to lower "
            "the learning rate.",
            codes=("clipping.cures", "clipping.aggressive"),
            draw=plot,
            applies=lambda record, _: (
                "loss" not in record.steps or len(clipped_runs(record)) != 1
            ),  # one point is no comparison
        ),
    ),
    studies={"clipping": StudyKind(diagnose=diagnose, pictures=("clipping", "loss-curves"))},
)
