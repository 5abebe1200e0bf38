"""`clipping_panel`: both pictures of the gradient norm, with the percentile of the threshold on a slider (F4.8, F4.9)."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.curves.clipping import ordinal
from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.panels.controls import Answer, Slider, controls_panel, needs, nothing
from workbench.plots.frames import curve, default_trial, lr_of
from workbench.plots.render import Draw
from workbench.topics.clipping.figures import plot_grad_norm, plot_grad_norm_histogram
from workbench.topics.clipping.thresholds import clipped_steps, listed_steps

ALT = "The gradient norm at each step, and how often each size occurs, with the threshold at a percentile."


def clipping_panel(
    record: RecordLike,
    diagnosis: Diagnosis | None = None,
    *,
    trial: int | None = None,
    percentile: float = 90.0,
    live: bool | None = None,
) -> Any:
    """Return the norms of a trial below a slider for the percentile: the threshold, how many steps it would clip, and which.

    The trial is by default the one that `clipping.threshold` of the diagnosis was measured on, else as in `plot_grad_norm`; `percentile`
    is where the slider starts (F4.9). `live` None asks the environment: `WORKBENCH_LIVE=0` means that nobody is looking. See
    `controls_panel` for what it returns.

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
            words += f": {listed_steps(touched)}." if touched.size else "."
        shown: dict[str, Any] = {"trial": number, "percentile": percentile}
        norms_of: Draw = lambda ax: plot_grad_norm(record, diagnosis, ax=ax, **shown)  # noqa: E731 - an answer holds functions
        sizes: Draw = lambda ax: plot_grad_norm_histogram(record, diagnosis, ax=ax, **shown)  # noqa: E731
        return Answer(words, [norms_of, sizes])

    control = Slider(label="percentile", low=1.0, high=100.0, start=percentile, step=1.0)
    return controls_panel("clipping_panel", answer, {"percentile": control}, alt=ALT, live=live)
