"""Where the time of a step goes, with what a change makes of it; and throughput against the number of workers."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.findings.audited import Audited
from workbench.plots.palette import BAD, BASELINE, GOOD, INK, PALETTE
from workbench.plots.style import Size, drawing, legend, log_scale, not_measured, short
from workbench.topics.input.bound import CHANGES, find_cause
from workbench.topics.input.throughput import Pipeline, knee

_FIX = CHANGES | {"drop": "unread features dropped", "no_sync": "no fetch in each step", "persistent": "persistent workers"}  # fmt: skip
_SEEN = 0.005  # share of a bar that can be seen: less is left out, and its colour has no name in the legend
_PARTS = {"latency": PALETTE[1], "preprocessing": PALETTE[6], "collate": PALETTE[4], "unused_features": PALETTE[5]}


def plot_input_pipeline(
    record: Audited, diagnosis: object = None, *, size: Size = "page", ax: Axes | None = None,  # noqa: ARG001
) -> Axes:  # fmt: skip
    """Draw the time of a step as it is, split up, above the same step without loading and with the change that was tried.

    Healthy: hardly any of the first bar is waiting, and the second bar is as long.
    Sick: much of the first bar is waiting. The third and fourth bar say what the change was predicted to give and gave; the
    last one what making a batch takes one process, and what it is spent on. What other programs took of the first bar is no part of
    the share in the title.

    Args:
        record: a study whose facts hold "input_pipeline", or what `audit_input` returns.

    Source: P1.1 (waiting against computing), P1.4 to P1.9 (the causes).
    """
    with drawing(ax, size, (7.4, 3.4)) as axes:
        facts = record.facts.get("input_pipeline")
        found = Pipeline(facts) if facts else None
        if found is None or math.isnan(found.now.period_s):
            return not_measured(axes, "no step was timed: wb.input.audit or wb.input.Study does")
        rows = _bars(found)
        seen: set[str] = set()
        for place, (_, parts) in enumerate(rows):
            left = 0.0
            for label, value, color in parts:
                known = "" if label in seen else label
                axes.barh(place, value * 1e3, left=left, height=0.6, color=color, label=known or None)
                seen.add(label)
                left += value * 1e3
            axes.annotate(
                f"{short(left)} ms", (left, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5
            )
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.margins(x=0.16)
        axes.grid(visible=False, axis="y")
        head = f"{found.now.wait_share:.0%} of a step waits for data" if found.has_step else "No step uses the batches"
        axes.set(xlabel="milliseconds of a step", ylabel="input pipeline", title=head)
        legend(axes)
    return axes


def _bars(found: Pipeline) -> list[tuple[str, list[tuple[str, float, Any]]]]:
    """Return the bars: name and (label, seconds, colour) of each part."""
    now, fix, parts = found.now, found.facts.get("fix"), find_cause(found).parts
    waits = [
        ("waiting for data", now.wait_s - now.restart_s, BAD), ("workers starting", now.restart_s, PALETTE[7]),
        ("other programs", now.period_s - now.own_s, PALETTE[3]),
    ]  # fmt: skip
    bars = [("as it is", [("computing", now.own_s - now.wait_s, GOOD), *(part for part in waits if part[1] > 1e-9)])]
    if found.has_step:
        bars.append(("batch at hand", [("computing", now.compute_s, GOOD)]))
    if fix:
        name = _FIX[fix["change"]].format(fix["value"])
        for what, value in (("predicted", fix["predicted_s"]), ("measured", fix["after_s"])):
            bars.append((f"{name}: {what}", [("with the change", value, BASELINE)]))
    if parts:
        least = _SEEN * sum(parts.values())
        shown = [(part.replace("_", " "), parts[part], color) for part, color in _PARTS.items() if parts[part] > least]
        bars.append(("making a batch", shown))
    return bars


def plot_input_workers(
    record: Audited, diagnosis: object = None, *, size: Size = "page", ax: Axes | None = None,  # noqa: ARG001
) -> Axes:  # fmt: skip
    """Draw batches per second against the number of worker processes, with the knee and what the step can use.

    Healthy: the curve is above the line of the step at the number of workers that are set, which is the filled square.
    Sick: it is below; where it meets the line is the number to set. A curve that stays flat is held up by something that
    workers share: the processors, the disk, or the hand-over of large batches.

    Args:
        record: a study whose facts hold "input_pipeline", or what `audit_input` returns.

    Source: P1.9 (throughput against the number of workers, with the knee marked).
    """
    with drawing(ax, size, (5.8, 3.8)) as axes:
        facts = record.facts.get("input_pipeline")
        found = Pipeline(facts) if facts else None
        rows = found.tried.get("workers") if found else None
        if found is None or not rows:
            return not_measured(axes, "no worker processes were tried")
        count, bend = np.array([r["workers"] for r in rows]), knee(rows)
        rate = np.array([_per_second(r) for r in rows])
        axes.plot(count, rate, "o-", color=GOOD, label="loader alone")
        ticks, as_is = {int(n) for n in count}, found.as_is
        alone = (r for r in found.facts["variants"] if r["change"] in ("as_is", "in_process") and not r["workers"])
        if row := next(alone, None):
            axes.axhline(_per_second(row), color=BASELINE, linestyle=":", label="without workers")
        if as_is and as_is["workers"]:
            own = int(as_is["workers"])
            ticks.add(own)
            axes.plot(own, _per_second(as_is), "s", color=INK, markersize=6, label=f"as it is: {own}")
        if len(rows) > 1:
            at = int(np.flatnonzero(count == bend)[0])
            axes.plot(count[at], rate[at], "s", color=INK, markersize=11, fillstyle="none", label=f"knee: {bend}")
        if found.now.compute_s > 0:
            axes.axhline(1 / found.now.compute_s, color=BAD, linestyle="--", label="what the step can use")
        log_scale(axes, "y")
        axes.margins(y=0.2)
        axes.set_xticks(sorted(ticks), [str(n) for n in sorted(ticks)])
        axes.set(xlabel="worker processes", ylabel="batches per second", title="Throughput against workers")
        legend(axes)
    return axes


def _per_second(row: Mapping[str, Any]) -> float:
    return float(1 / max(row["batch_s"], 1e-9))
