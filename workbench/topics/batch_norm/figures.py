"""How many examples make a batch-norm statistic, and how far the devices of one batch lie apart."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.curves.trial_curves import RecordLike as Record
from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import finding
from workbench.plots.palette import BAD, BASELINE, GOOD, PALETTE
from workbench.plots.style import Size, drawing, legend, log_scale, not_measured, ticks_at
from workbench.record.json_values import number
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm

SHIFT = 0.05  # how far the two series at one size are moved apart, as a share of it
OTHERS = {"layer": (PALETTE[4], ":"), "group": (PALETTE[9], "-.")}  # how the lines of other norms look


def plot_batch_norm(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw the selected metric against the examples in a batch-norm statistic, at a fixed total batch.

    Healthy: the whole batch, at the right, is as good as any smaller statistic, within the bars. Sick: it rises to the right (the
    noise of smaller statistics regularises: try the best one as `bn_stat_examples`) or steeply to the left (too few examples).
    One small mark a seed, bars of one standard error. Circles: a
    subsample of the batch gives the statistics of all of it. Squares: the batch is split over devices, each of which normalises its own part.
    Bands: another norm in the place of batch norm at the same batch size, each at the best of the same learning rates.

    Source: P6.1, P6.2, P6.4.
    """
    arms, split = (_rows(record, diagnosis, "ghost_size", name) for name in ("arms", "split"))
    with drawing(ax, size) as axes:
        rows = arms + split
        if not rows:
            return not_measured(axes, "no virtual batch was trained")
        _draw(axes, arms, "statistics from a subsample (± standard error)", look=("o", GOOD), shift=1 - SHIFT)
        _draw(axes, split, "batch split over devices (± standard error)", look=("s", PALETTE[1]), shift=1 + SHIFT)
        for whole in (row for row in arms if row["stat_examples"] is None):
            axes.axhline(number(whole["mean"]), color=BASELINE, linestyle="--", label="whole batch", zorder=1)
        batch = rows[0]["batch_size"]
        for row in _rows(record, diagnosis, "small_batch", "norms"):
            if row["norm"] != "batch" and row["batch_size"] == batch:
                color, linestyle = OTHERS[row["norm"]]
                mean, se = number(row["mean"]), np.nan_to_num(number(row["se"]))
                axes.axhspan(mean - se, mean + se, color=color, alpha=0.12, zorder=0)
                axes.axhline(mean, color=color, linestyle=linestyle, label=f"{row['norm']} norm instead", zorder=1)
        title = f"Batch norm at a total batch of {batch:,}"
        axes.set(xlabel="examples in a statistic", ylabel=str(record.config["select"]), title=title)
        ticks_at(axes, [int(row["statistic"]) for row in rows], margin=1.4)
        legend(axes)
    return axes


def plot_batch_norm_devices(
    record: Record, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None
) -> Axes:
    """Draw how far the devices of one batch lie apart, against how many there are: their statistics, and the loss with each's.

    Healthy: lines that stay below a few percent: whichever device evaluates, it says the same. Sick: lines that rise towards 1, as where
    shards differ; then the running statistics have to be synchronised before anything is evaluated or written.

    Statistics in standard deviations, root mean square over the channels of the worst layer; the range of the validation loss over
    the devices, as a share of it. A synchronised batch norm lies at 0.

    Source: P6.2, P6.3.
    """
    rows = [row for row in _rows(record, diagnosis, "rank_local", "devices") if row["devices"] > 1]
    with drawing(ax, size) as axes:
        if not rows:
            return not_measured(axes, "no batch was split over several devices")
        for kind, color in (("dealt", GOOD), ("sorted", BAD)):
            of_kind = [row for row in rows if row["shards"] == kind]
            x = [row["devices"] for row in of_kind]
            own = [[number(value) for value in row["losses"]["own"]] for row in of_kind]
            whole = [abs(number(row["losses"]["whole"])) for row in of_kind]
            for label, style, values in (
                ("batch statistics", ":", [number(row["step_apart"]) for row in of_kind]),
                ("running statistics", "--", [number(row["apart"]) for row in of_kind]),
                ("validation loss", "-", [np.ptp(losses) / all_ for losses, all_ in zip(own, whole, strict=True)]),
            ):
                if x:
                    axes.plot(x, values, style, marker="o", markersize=5, color=color, label=f"{label}, {kind} shards")
        axes.set(xlabel="devices", ylabel="distance between devices", title="One batch on several devices")
        ticks_at(axes, [int(row["devices"]) for row in rows], margin=1.4)
        if axes.dataLim.intervaly[0] > 0:
            log_scale(axes, "y")
        legend(axes)
    return axes


def _rows(record: Record, diagnosis: Diagnosis | None, code: str, name: str) -> list[Mapping[str, Any]]:
    """Return rows of the evidence of a code, those left out that have no finite mean."""
    found = finding(diagnosis, f"batch_norm.{code}") or diagnose_batch_norm(record)[f"batch_norm.{code}"]
    return [row for row in found.evidence.get(name) or () if math.isfinite(number(row.get("mean", 0.0)))]


def _draw(ax: Axes, rows: Sequence[Mapping[str, Any]], label: str, *, look: tuple[str, str], shift: float) -> None:
    """Draw the arms: a small mark for each seed, and the means with their standard errors."""
    marker, color = look
    x = np.array([number(row["statistic"]) for row in rows]) * shift
    for at, row in zip(x, rows, strict=True):
        values = [number(value) for value in row["values"]]
        ax.plot([at] * len(values), values, marker, color=color, markersize=4, alpha=0.5, linestyle="none", zorder=2)
    if rows:
        means, errors = (np.nan_to_num([number(row[name]) for row in rows]) for name in ("mean", "se"))
        ax.errorbar(x, means, errors, fmt=f"{marker}-", color=color, markersize=7, capsize=3, label=label, zorder=3)
