"""`clipping_panel`: both pictures of the gradient norm, with the percentile of the threshold on a slider (F4.8, F4.9)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.clipping import ordinal
from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.panels.controls import Answer, Slider, controls_panel, needs, nothing
from workbench.plots.frames import curve, default_trial, lr_of
from workbench.plots.render import Draw
from workbench.topics.clipping.figures import clipped_steps, plot_grad_norm, plot_grad_norm_histogram

ALT = "The gradient norm at each step, and how often each size occurs, with the threshold at a percentile."


def _listed(steps: NDArray[np.int64], *, most: int = 8) -> str:
    """Return step numbers, neighbours as one stretch, those beyond `most` counted: "3, 17, 40 to 44 and 2 more"."""
    runs = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1)
    named = [f"{run[0]:,}" if run.size == 1 else f"{run[0]:,} to {run[-1]:,}" for run in runs[:most]]
    rest = sum(run.size for run in runs[most:])
    return ", ".join(named) + (f" and {rest:,} more" if rest else "")


def clipping_panel(
    record: RecordLike,
    diagnosis: Diagnosis | None = None,
    *,
    trial: int | None = None,
    percentile: float = 90.0,
    live: bool | None = None,
) -> Any:
    """Return the norms of a trial below a slider for the percentile: the threshold, how many steps it would clip, and which.

    The trial is by default the one that `clipping.threshold` of the diagnosis was measured on, else as in `plot_grad_norm`. `live` None
    asks the environment, see `controls_panel`.

    Source: F4.8 (both pictures), F4.9 (the percentile), F4.10 (lowered until training is stable), F4.11 (the clipped share).
    """
    needs("clipping_panel", record, "steps", "trials")
    if trial is None and diagnosis is not None and "clipping.threshold" in diagnosis:
        trial = diagnosis["clipping.threshold"].evidence.get("trial")
    number = default_trial(record, diagnosis) if trial is None else trial
    steps, norms = curve(record, number, "grad_norm")
    if not steps.size:
        why = "the record has no gradient norms. Run wb.clipping.Study().run(workload, out=...), or any study of wb.Trainer."
        return nothing("clipping_panel", why, alt=ALT, live=live)

    def answer(percentile: float) -> Answer:
        chosen, touched = clipped_steps(steps, norms, percentile=percentile, diagnosis=diagnosis, trial=number)
        head = f"Trial {number}, lr {lr_of(record, number):.4g}: "
        if chosen.threshold is None:
            words = f"{head}no threshold, because {chosen.reason}."
        else:
            finite = int(np.isfinite(norms).sum())
            words = f"{head}the {ordinal(percentile)} percentile is {chosen.threshold:.4g}; it clips {chosen.clip_frac:.1%}, {touched.size:,} of {finite:,} steps"
            words += f": {_listed(touched)}." if touched.size else "."
        shown: dict[str, Any] = {"trial": number, "percentile": percentile}
        norms_of: Draw = lambda ax: plot_grad_norm(record, diagnosis, ax=ax, **shown)  # noqa: E731 - an answer holds functions
        sizes: Draw = lambda ax: plot_grad_norm_histogram(record, diagnosis, ax=ax, **shown)  # noqa: E731
        return Answer(words, [norms_of, sizes])

    control = Slider(label="percentile", low=1.0, high=100.0, start=percentile, step=1.0)
    return controls_panel("clipping_panel", answer, {"percentile": control}, alt=ALT, live=live)
