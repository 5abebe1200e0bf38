"""The warmups that were tried, as one picture: learning rate against length, and which of them train."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import finding
from workbench.plots.style import BAD, BASELINE, GOOD, INK, Size, drawing, legend, log_scale, not_measured, short
from workbench.record.json_values import number
from workbench.topics.warmup.diagnose import diagnose_warmup

NO_WARMUP = 0.5  # where no warmup is drawn: a logarithmic axis has no place for 0
_LOOKS: tuple[tuple[str, bool, str, dict[str, Any]], ...] = (
    ("short", True, "short trial trains", {"marker": "o", "color": GOOD, "markersize": 6}),
    ("short", False, "short trial does not", {"marker": "x", "color": BAD, "markersize": 7, "markeredgewidth": 1.8}),
    ("full", True, "full run trains", {"marker": "o", "color": GOOD, "markersize": 12, "fillstyle": "none"}),
    ("full", False, "full run does not", {"marker": "X", "color": BAD, "markersize": 12, "fillstyle": "none"}),
)


def plot_warmup(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw every warmup that was tried, by its length and the learning rate it leads to, and mark the shortest that trains.

    Healthy: at each learning rate circles to the right of crosses, the star where they meet, left of the cap, and at or above
    10 times the unstable learning rate. Sick: crosses up to the cap (no allowed warmup opens that learning rate), or a dot
    within a hollow cross (stable in the short trial, not in the full run: a later blow-up).

    Small marks are short trials, large ones runs of the full budget, as in `warmup.shortest` of the diagnosis.

    Source: F3.6 (the shortest, with the next shorter one failing), F3.4 (one row for each multiple), F3.10 (the cap).
    """
    with drawing(ax, size, (6.8, 4.0)) as axes:
        found = finding(diagnosis, "warmup.shortest")
        if found is None and "loss" in record.steps:
            found = diagnose_warmup(record)["warmup.shortest"]
        evidence = {} if found is None else found.evidence
        rounds: Sequence[Mapping[str, Any]] = evidence.get("rounds", ())
        runs = [(number(r["lr"]), one) for r in rounds for one in r["lengths"]]
        if not runs:
            return not_measured(axes, "the record has no finished trial of a warmup")
        axes.set(xlabel="warmup steps", ylabel="learning rate after the warmup", title="Which warmups train")
        for kind, trains, label, style in _LOOKS:
            shown = [(_x(one["steps"]), lr) for lr, one in runs if one[kind] is trains]
            if shown:
                x, y = zip(*shown, strict=True)
                axes.plot(x, y, linestyle="none", label=f"{label} ({len(shown)})", zorder=3, **style)
        stars = [(r["shortest"], number(r["lr"]), r["next_shorter"]) for r in rounds if r["shortest"] is not None]
        for index, (steps, lr, low) in enumerate(stars):
            label = f"shortest: {steps:,} steps at lr {short(lr)}"
            axes.plot(_x(steps), lr, "*", color=INK, markersize=9, zorder=5, label=label)
            if low is not None:
                gap = "the answer lies between" if index == 0 else None
                look: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": ":", "zorder": 2}
                axes.plot([_x(low), _x(steps)], [lr, lr], label=gap, **look)
        cap, unstable = number(evidence.get("cap")), number(evidence.get("unstable_lr"))
        if cap > 0:
            axes.axvline(cap, color=BASELINE, linestyle="--", label=f"cap: {int(cap):,} steps")
        if unstable > 0:
            axes.axhline(unstable, color=BAD, linestyle="-.", label=f"unstable without warmup: {short(unstable)}")
        log_scale(axes, "x", "y")
        lengths = [_x(one["steps"]) for _, one in runs] + [max(cap, NO_WARMUP)]
        lrs = [lr for lr, _ in runs] + [unstable]
        axes.set_xlim(np.nanmin(lengths) / 1.5, np.nanmax(lengths) * 1.5)
        bottom, top = np.nanmin(lrs) / 1.5, np.nanmax(lrs) * 1.5
        axes.set_ylim(bottom, top)
        if min(lengths) == NO_WARMUP:
            axes.set_xlabel(f"warmup steps ({NO_WARMUP:g} stands for none)")
        legend(axes)
    return axes


def _x(steps: int) -> float:
    return float(steps) if steps else NO_WARMUP
