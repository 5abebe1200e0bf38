"""What each rank does with its time, and which examples it sees."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.findings.diagnosis import Diagnosis
from workbench.plots.frames import finding
from workbench.plots.style import BAD, BASELINE, GOOD, Size, drawing, legend, not_measured
from workbench.topics.hosts.diagnose_data import training_shards

MAX_MARKS = 4000  # examples drawn of each rank, evenly chosen; the numbers in the title are of all


def plot_hosts(record: Any, diagnosis: Diagnosis | None = None, *, size: Size = "page", ax: Axes | None = None) -> Axes:
    """Draw how long each rank is busy in a step, and how long it waits for the others.

    Healthy: bars of one length, with little waiting behind each. Sick: one rank is busy much longer, and all others wait as long as
    the difference: a straggler, in red where the diagnosis warns of it.

    Returns:
        The axes: one row a rank, the first at the top; medians over the steps.

    Source: P7.1.
    """
    with drawing(ax, size, (6.4, 3.0)) as axes:
        rows = [(r["rank"], r["times"]) for r in _ranks(record) if len(r["times"]["busy_s"])]
        medians = {rank: (np.median(times["busy_s"]) * 1e3, np.median(times["step_s"]) * 1e3) for rank, times in rows}
        medians = {rank: found for rank, found in medians.items() if np.isfinite(found).all()}
        if not medians:
            return not_measured(axes, "no rank has timed steps")
        busy, step = np.array(list(medians.values())).T
        places, straggler = np.arange(len(medians)), finding(diagnosis, "hosts.straggler")
        warns = straggler is not None and straggler.status == "warn"
        colors = [BAD if warns and place == int(busy.argmax()) else GOOD for place in places]
        axes.barh(places, busy, color=colors, height=0.6, label="busy")
        waits: dict[str, Any] = {"color": BASELINE, "alpha": 0.45, "label": "waits for other ranks"}
        axes.barh(places, np.maximum(step - busy, 0), left=busy, height=0.6, **waits)
        axes.set_yticks(places, [str(rank) for rank in medians])
        axes.set_ylim(len(medians) - 0.4, -0.9)
        axes.set(xlabel="time of a step (ms, median)", ylabel="rank", title="What each rank does with its time")
        axes.margins(x=0.05)
        legend(axes)
    return axes


def plot_shards(record: Any, *, size: Size = "page", ax: Axes | None = None) -> Axes:
    """Draw which examples of the training data each rank saw in the first epoch.

    Healthy: each example in one row, and none in the row of those that no rank saw. Sick: red marks, examples that several ranks
    train on; or many marks in the last row, examples that nobody trains on. A few there are the incomplete last batch of
    that epoch.

    Returns:
        The axes: one row a rank, and one for examples that are on none.

    Source: P7.4.
    """
    with drawing(ax, size, (6.4, 3.0)) as axes:
        ranks = _ranks(record)
        found = [s for s in training_shards(ranks) if s.by == "index" and s.why_not is None] if len(ranks) > 1 else []
        if not found:
            return not_measured(axes, "no training data whose examples can be told apart")
        shards, twice = found[0], set(found[0].twice)
        nobody = set(range(shards.size or 0)) - set(shards.holders) if shards.whole else set()
        rows = [(place, set(examples)) for place, examples in enumerate(shards.examples.values())]
        marks = [(place, seen - twice, GOOD) for place, seen in rows] + [
            (place, seen & twice, BAD) for place, seen in rows
        ]
        for place, examples, color in (*marks, (len(rows), nobody, BASELINE)):
            shown = sorted(examples)[:: max(1, len(examples) // MAX_MARKS)]
            axes.plot(shown, [place] * len(shown), "|", color=color, markersize=14, mew=0.6, rasterized=True)
        for color, said in ((GOOD, "on one rank"), (BAD, "on several ranks")):
            axes.plot([], [], "s", color=color, label=said)  # a mark of one example is a hairline
        axes.set_yticks(range(len(rows) + 1), [*map(str, shards.examples), "none"])
        axes.set_ylim(len(rows) + 0.6, -0.6)
        title = f"Who trains on which of {shards.size:,} examples" if shards.size else "Who trains on which examples"
        axes.set(xlabel="position in the training data (first epoch)", ylabel="rank", title=title)
        axes.margins(x=0.01)
        legend(axes)
    return axes


def _ranks(record: Any) -> list[dict[str, Any]]:
    return list((record.facts.get("hosts") or {}).get("ranks") or ())
