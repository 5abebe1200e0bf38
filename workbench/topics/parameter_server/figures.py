"""Which server carries what, how old gradients are, and what more workers bring."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from workbench.findings.diagnosis import Diagnosis
from workbench.plots.style import BAD, BASELINE, GOOD, INK, PALETTE, STYLES, Size, drawing, legend, not_measured, short
from workbench.topics.parameter_server.diagnose import histogram
from workbench.topics.parameter_server.server_load import saturation, server_load, server_throughput

SHOWN = 5  # variables that get a colour of their own, the heaviest ones; the others are drawn together
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
MAX_LAGS = 40


def plot_server_load(
    record: Any,
    diagnosis: Diagnosis | None = None,
    *,
    trial: int | None = None,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw the bytes that each parameter server sends and receives in a step, by the variables that cause them.

    Healthy: bars that end at the dashed line, the mean. Sick: one bar far beyond it: that server decides how fast all are, and its
    longest part is the variable to split. Its end is marked in red where the diagnosis warns of it.

    Args:
        diagnosis: of `diagnose_parameter_server`; marks the overloaded server.
        trial: which one; None is the first with facts about parameter servers.

    Source: T13.1, T13.2.
    """
    with drawing(ax, size, (6.6, 3.2)) as axes:
        facts = _facts(record, trial)
        parts = _parts(facts)
        if parts.empty or not np.isfinite(parts["bytes"]).all() or not parts["bytes"].sum() > 0:
            return not_measured(axes, "no bytes were counted on parameter servers")
        servers, steps = len(facts["servers"]), float(facts.get("steps") or 1)
        order = parts.groupby("part")["bytes"].sum().sort_values(ascending=False)
        ends = np.zeros(servers)
        for place, name in enumerate([*order.index[:SHOWN], None]):
            mine = parts[parts["part"] == name] if name is not None else parts[parts["part"].isin(order.index[SHOWN:])]
            if mine.empty:
                continue
            total = mine.groupby("server")["bytes"].sum().reindex(range(servers), fill_value=0.0).to_numpy()
            color, label = PALETTE[(0, 1, 4, 9, 7, 7)[place]], str(name)
            if name is None:
                color, label = BASELINE, f"{len(order) - SHOWN} more"
            at, widths = np.arange(servers), total / steps / 1e3
            look: dict[str, Any] = {"edgecolor": INK, "hatch": HATCHES[place], "color": color}
            axes.barh(at, widths, height=0.6, left=ends, label=label, linewidth=0.4, **look)
            ends += total / steps / 1e3
        axes.axvline(ends.mean(), color=INK, linestyle="--", label="mean of the servers")
        finding = diagnosis["ps.imbalance"] if diagnosis is not None and "ps.imbalance" in diagnosis else None
        if finding is not None and finding.status == "warn":
            worst = int(finding.evidence["server"])
            label = f"{finding.value:.2f} times the mean"
            axes.plot(ends[worst], worst, ">", color=BAD, markersize=9, clip_on=False, label=label)
        axes.set_yticks(range(servers), [f"ps {k}" for k in range(servers)])
        axes.set_ylim(servers - 0.4, -0.6)
        axes.set(xlabel="KB a step, sent and received", ylabel="parameter server", title="Which server carries what")
        axes.set_xlim(0, 1.06 * max(ends.max(), 1e-12))
        legend(axes)
    return axes


def plot_staleness(
    record: Any,
    diagnosis: Diagnosis | None = None,
    *,
    trial: int | None = None,
    size: Size = "page",
    ax: Axes | None = None,
) -> Axes:
    """Draw how many updates of others came between reading the parameters and applying the gradient.

    Healthy: most of the mass up to the solid line, the number of other workers. Sick: a tail beyond the dotted line, where the
    diagnosis warns: gradients of a slow worker, computed for parameters of long ago.

    Ages beyond 40 updates share the last bar.

    Args:
        diagnosis: of `diagnose_parameter_server`; draws its threshold.
        trial: which one; None is the first with facts about parameter servers.

    Source: T1.2.
    """
    with drawing(ax, size, (6.2, 3.6)) as axes:
        facts = _facts(record, trial)
        counts = histogram(facts)
        total = sum(counts.values())
        if not total:
            return not_measured(axes, "no gradient was pushed to a parameter server")
        last = min(MAX_LAGS, max(counts))
        shares = np.zeros(last + 1)
        for lag, count in counts.items():
            shares[min(max(lag, 0), last)] += count / total
        others = int(facts.get("workers") or 1) - 1
        axes.bar(np.arange(last + 1), shares, width=0.8, color=GOOD, label="updates")
        axes.axvline(others, color=INK, linestyle="-", linewidth=1.2, label=f"other workers: {others}")
        mean = sum(lag * count for lag, count in counts.items()) / total
        axes.axvline(mean, color=BASELINE, linestyle="--", label=f"mean: {short(mean)}")
        finding = diagnosis["ps.staleness"] if diagnosis is not None and "ps.staleness" in diagnosis else None
        if finding is not None and finding.threshold is not None:
            limit = "limit of the 95th percentile"
            axes.axvline(finding.threshold, color=BAD, linestyle=":", linewidth=1.8, label=limit)
        axes.set(xlabel="staleness (updates)", ylabel="share of the updates")
        axes.set_title("How old gradients are when they are applied")
        axes.set_ylim(0, None)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(axes)
    return axes


def plot_throughput(record: Any, *, size: Size = "page", ax: Axes | None = None) -> Axes:
    """Draw updates per second against the number of workers, one line for each way of dispatching.

    Healthy: points near the dashed line, which grows with the workers. Sick: a line that turns flat; a ring marks where more workers
    stop helping: the coordinator, a server or the machine is used up.

    Points are medians where several trials are alike.

    Args:
        record: a study of `ParameterServerStudy`, or any with trials on parameter servers.

    Source: T1.3, T13.6.
    """
    with drawing(ax, size, (6.2, 3.8)) as axes:
        table = server_throughput(record)
        table = table[np.isfinite(table["updates_per_s"].astype(float)) & (table["name"] != "sharded")]
        if not len(table):
            return not_measured(axes, "no trial on parameter servers was timed")
        rates = table.groupby(["steps_per_closure", "workers"])["updates_per_s"].median()
        sizes = rates.index.get_level_values(0).unique()
        lines = sorted(sizes, key=lambda many: (len(rates[many]) < 2, len(many), many))
        for place, many in enumerate(lines):
            one = rates[many].sort_index()
            label = "as many as pay off (auto)" if many == "auto" else f"{many} update{'s' * (many != '1')} a closure"
            style = STYLES[place % len(STYLES)] if len(one) > 1 else "none"
            color, marker = PALETTE[(0, 1, 4, 5, 6, 9)[place % 6]], "osD^v<"[place % 6]
            axes.plot(one.index, one, marker=marker, linestyle=style, color=color, label=label)
            flat = saturation(one.index, one.to_numpy())
            if flat is not None:
                label = f"saturated at {flat} worker{'s' * (flat != 1)}"
                axes.plot(flat, one[flat], "o", color=BAD, markersize=15, fillstyle="none", label=label)
        first = rates[lines[0]].sort_index()
        ideal = np.array([first.index[0], max(int(table["workers"].max()), first.index[0] + 1)])
        rate, proportional = first.iloc[0] / first.index[0] * ideal, "in proportion to the workers"
        axes.plot(ideal, rate, color=INK, linestyle=":", linewidth=1.0, label=proportional)
        axes.set(xlabel="workers", ylabel="updates per second", title="What more workers bring")
        axes.set_ylim(0, 1.3 * max(table["updates_per_s"].max(), first.iloc[0]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(axes)
    return axes


def _facts(record: Any, trial: int | None) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record.facts.get("parameter_server") or {}
    return dict(found[str(min(map(int, found)) if trial is None else trial)]) if found else {}


def _parts(facts: Mapping[str, Any]) -> pd.DataFrame:
    """Return bytes by server and variable; a block of many parameters shares them out by its values."""
    rows = []
    for row in server_load(facts).itertuples():
        inside = facts["servers"][row.server]["blocks"][row.block].get("parameters") or {row.group: 1}
        whole = sum(inside.values())
        rows += [(row.server, name, row.bytes * size / whole) for name, size in inside.items()]
    return pd.DataFrame(rows, columns=["server", "part", "bytes"])
