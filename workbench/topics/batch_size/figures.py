"""Batch sizes side by side: what they reach as they are and tuned, and which learning rates they want."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import finding
from workbench.plots.palette import BAD, BASELINE, GOOD, INK, PALETTE, PAPER
from workbench.plots.style import Size, drawing, legend, log_scale, not_measured, ticks_at
from workbench.record.json_values import number
from workbench.topics.batch_size.diagnose import diagnose_batch_size

SHIFT = 0.06  # how far groups at one batch size are moved apart, as a share of it


def plot_batch_size(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw the selected metric under fresh seeds against the batch size: settings of the baseline, and tuned for each.

    Healthy: the crosses differ and the dots do not: what looked like an effect of the batch size was an effect of settings that
    fitted one of them. Sick: dots that stay apart; then something else needs tuning (regularisation, steps), or the batch is
    beyond the noise scale, the dotted line, at equal examples.

    One small mark a seed, a line through the geometric means at equal steps and one at equal examples.

    Source: F6.2, F6.3, F6.7.
    """
    found, arms = _arms(record, diagnosis)
    noise = finding(found, "batch_size.noise_scale")
    with drawing(ax, size) as axes:
        if not any(arm["fixed"] or arm["tuned"] for arm in arms):
            return not_measured(axes, "no batch size was trained under fresh seeds")
        own = int(record.config["batch_size"])
        base = next(arm for arm in arms if arm["batch_size"] == own)
        looks = [("fixed", "settings of the baseline", "x", BAD), ("tuned", "tuned for each", "o", GOOD)]
        places = itertools.count()
        for kind, label, marker, color in looks[: 1 + any(arm["tried"] > 1 for arm in arms)]:
            for name, where, line in (("steps", "total_steps", "-"), ("examples", "examples", "--")):
                shift, shown = 1 + SHIFT * (next(places) - 1.5), []
                for arm in _as_long(arms, base, where):
                    values = [v for v in map(number, arm[kind]) if math.isfinite(v)]
                    shown += [(arm["batch_size"] * shift, values)] if values else []
                look: dict[str, Any] = {"marker": marker, "color": color}
                for x, values in shown:
                    axes.plot([x] * len(values), values, linestyle="none", markersize=4, alpha=0.6, zorder=3, **look)
                means = [math.exp(np.mean(np.log(v))) if min(v) > 0 else float(np.mean(v)) for _, v in shown]
                if shown:
                    look |= {"markersize": 8, "linewidth": 1.4, "linestyle": line, "label": f"{label}, equal {name}"}
                    axes.plot([x for x, _ in shown], means, zorder=4, **look)
        value = number(None if noise is None else noise.value)
        if math.isfinite(value):
            label = f"noise scale {value:,.3g}"
            axes.axvline(value, color=BASELINE, linestyle=":", linewidth=1.4, label=label, zorder=1)
        axes.set_xlabel("batch size (a small mark is a seed, a large one their mean)")
        axes.set(ylabel=str(record.config["select"]), title="Batch sizes, as they are and tuned")
        ticks_at(axes, [arm["batch_size"] for arm in arms])
        if axes.get_ylim()[0] > 0:
            log_scale(axes, "y")
        legend(axes)
    return axes


def plot_tuned_lr(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw the best learning rate of each batch size, beside the two rules by which it is often scaled.

    Healthy: filled marks; no shape is the right one, and the thin lines show which rule, if any, would have found it. Sick: a hollow
    mark lies at the end of what was tried, so that the best may lie beyond.

    For a rule with momentum the learning rate is that of its steps, lr / (1 - momentum).

    Source: F6.4.
    """
    _, arms = _arms(record, diagnosis)
    with drawing(ax, size) as axes:
        own = next((a for a in arms if a["batch_size"] == int(record.config["batch_size"])), None)
        if own is None or own["best_lr"] is None or all(arm["tried"] < 2 for arm in arms):
            return not_measured(axes, "no learning rate was tuned for any batch size")
        averaged = str(record.config["optimizer"]) in ("momentum", "nesterov")

        def step_lr(arm: Mapping[str, Any]) -> float:
            return number(arm["best_lr"]) / (1 - number(arm["best_memory"]) if averaged else 1.0)

        tuned = [arm for arm in arms if arm["best_lr"] is not None]
        looks = (("steps", "total_steps", PALETTE[0], "o", 12), ("examples", "examples", PALETTE[1], "s", 6))
        for name, where, color, marker, wide in looks:  # the second is smaller, so that both show where they agree
            line = _as_long(tuned, own, where)
            x, y = [a["batch_size"] for a in line], [step_lr(a) for a in line]
            axes.plot(x, y, color=color, linewidth=wide / 4, label=f"best at equal {name}")
            for a in line:
                face = PAPER if a["at_edge"] else color
                axes.plot(a["batch_size"], step_lr(a), marker, color=color, markerfacecolor=face, markersize=wide)
        sizes = np.array(sorted({a["batch_size"] for a in tuned}), dtype=np.float64)
        for power, label, style in ((1.0, "proportional to the batch", "--"), (0.5, "to its square root", ":")):
            scaled = step_lr(own) * (sizes / own["batch_size"]) ** power
            axes.plot(sizes, scaled, style, color=BASELINE, linewidth=1.0, label=label, zorder=1)
        if any(a["at_edge"] for a in tuned):
            axes.plot([], [], "o", color=INK, fillstyle="none", label="hollow: at the end of what was tried")
        axes.set_ylabel("learning rate / (1 - momentum)" if averaged else "learning rate")
        axes.set(xlabel="batch size", title="The learning rate that each batch size wants")
        ticks_at(axes, sizes.tolist())
        log_scale(axes, "y")
        legend(axes)
    return axes


def _arms(record: Record, diagnosis: Diagnosis | None) -> tuple[Diagnosis | None, Sequence[Mapping[str, Any]]]:
    """Return a diagnosis that speaks of batch sizes, and the arms that it knows."""
    if finding(diagnosis, "batch_size.tuned_directly") is None and "loss" in record.steps:
        diagnosis = diagnose_batch_size(record)
    found = finding(diagnosis, "batch_size.tuned_directly")
    return diagnosis, () if found is None else found.evidence.get("arms", ())


def _as_long(arms: Sequence[Mapping[str, Any]], own: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Return the arms with as many "total_steps" or "examples" as the baseline's, to 5 %."""
    return [arm for arm in arms if math.isclose(number(arm[where]), number(own[where]), rel_tol=0.05)]
