"""Pictures of instability: the every-step probe, and the runs far above the best learning rate."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import best_lr, curve, evaluations, finding, lr_of, trials_at, trials_in
from workbench.plots.loss import draw_trial_loss, fit_y, loss_axes
from workbench.plots.palette import BAD, BASELINE, GOOD, PALETTE
from workbench.plots.style import Size, draw_curve, drawing, legend, mark_steps, not_measured, short

Floats = NDArray[np.float64]


def plot_probe(
    record: Record,
    diagnosis: Diagnosis | None = None,
    *,
    split: str = "validation",
    metric: str = "loss",
    every_steps: int = 100,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw the probe: a short run at twice the best lr, evaluated at every step, and what a coarse interval shows.

    Healthy: both curves tell the same story, a loss that falls from the start. Sick: the every-step curve climbs above
    the dotted line (the loss before the first update) and recovers, while the coarse curve misses most of it: the
    model is unstable early and then recovers to slow training.

    `stability.early` and `.early_recovers` of the diagnosis add the step at which the first rise starts. The training loss is drawn
    where the split was not evaluated. Source: F1.10, F1.11.
    """
    with drawing(ax, size) as axes:
        probes = trials_in(record, "probe")
        if not probes:
            return not_measured(axes, "the record has no probe run")
        (steps, values), name = evaluations(record, probes[0], split=split, metric=metric), f"{split} {metric}"
        if steps.size < 3:
            (steps, values), name = curve(record, probes[0], "loss"), "training loss"
        finite = np.isfinite(values)
        if finite.sum() < 2:
            return not_measured(axes, "the probe has fewer than two finite values")
        axes.set_ylabel(name, parse_math=False)
        coarse, worst = steps % every_steps == 0, np.where(finite, values, np.inf)
        axes.axhline(values[0], color=BASELINE, linestyle=":", label=f"before the first update: {short(values[0])}")
        peak = f"every step (max {short(worst.max())})"
        fine = draw_curve(axes, steps, values, color=GOOD, linewidth=1.1, label=peak)
        label = f"every {every_steps} steps (max {short(worst[coarse].max(initial=-np.inf))})"
        look: dict[str, Any] = {"color": PALETTE[1], "linestyle": "--", "marker": "o"}
        rough = draw_curve(axes, steps[coarse], values[coarse], label=label, **look)
        if not finite.all():
            mark_steps(axes, steps[~finite][:1], label="not finite from here")
        fit_y(axes, [fine, rough])
        found = [finding(diagnosis, code) for code in ("stability.early", "stability.early_recovers")]
        onsets = [
            (int(hit["onset_step"]), "recovers" in item.code)
            for item in found if item is not None
            for hit in item.evidence.get("hits", ())
            if hit.get("trial") == probes[0] and hit.get("onset_step") is not None
        ]  # fmt: skip
        for step, recovers in sorted(onsets)[:1]:
            label = f"the loss rises from step {step:,}" + (", and recovers" if recovers else "")
            axes.axvline(step, color=BAD, linestyle=":", label=label)
        title = f"Probe at lr {short(lr_of(record, probes[0]))}, evaluated at every step"
        axes.set(xlabel="step", title=title)
        axes.margins(x=0.01)
        legend(axes)
    return axes


def plot_confirm(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw the training loss of the runs far above the best learning rate, at first 5 and 10 times, beside the run at the best.

    Sick: the loss falls steadily and then rises of a sudden; that is optimisation instability. Not that sign: a loss
    that falls to the end (the model takes the larger lr), or one that never fell (no training to become unstable).

    `lr.best` of the diagnosis adds the run at the best lr, `stability.mid` what each run shows, and its jump. Source: F1.13.
    """
    with drawing(ax, size) as axes:
        best, trained = best_lr(diagnosis)
        shown = [t for t in trials_in(record, "confirm") if np.isfinite(curve(record, t, "loss")[1]).any()]
        if not shown:
            return not_measured(axes, "the record has no run far above the best learning rate")
        at_best = next(filter(None, (trials_at(record, lr, "lr_sweep", "baseline") for lr in (best, trained))), [])[:1]
        curves = [draw_trial_loss(axes, record, trial, index=0, relative_to=best) for trial in at_best]
        found = finding(diagnosis, "stability.mid")
        rows: Sequence[Mapping[str, Any]] = found.evidence.get("confirm", ()) if found is not None else ()
        said = {int(row["trial"]): row for row in rows}
        for index, trial in enumerate(shown, start=1):
            row = said.get(trial, {})
            note = str(row.get("shape", ""))
            curves.append(draw_trial_loss(axes, record, trial, index=index, relative_to=best, note=note))
            if row.get("jump_step") is not None:
                jump, lr = int(row["jump_step"]), short(lr_of(record, trial))
                axes.axvline(jump, color=PALETTE[index], linestyle=":", label=f"lr {lr} jumps after step {jump:,}")
        loss_axes(
            axes, [line for line in curves if line is not None], title="Training loss far above the best learning rate"
        )
    return axes
