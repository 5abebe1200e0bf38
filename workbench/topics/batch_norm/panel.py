"""`batch_norm_panel`: hosts and virtual batch on sliders: whose examples make a statistic, and who has to be synchronised (P6)."""

from __future__ import annotations

import math
from typing import Any

from workbench.checks import check_integer
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.panels.controls import Answer, Choice, Control, controls_panel, needs
from workbench.plots.render import Draw
from workbench.plots.style import short
from workbench.record.json_values import number
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm
from workbench.topics.batch_norm.figures import plot_batch_norm, plot_batch_norm_layout
from workbench.topics.batch_norm.replicas import statistics_layout

ALT = "The examples of each host, coloured by the statistic that they make, beside the selected metric by examples in a statistic."


def batch_norm_panel(
    record: Any = None, diagnosis: Diagnosis | None = None, *, batch_size: int | None = None, hosts: int = 8,
    stat_examples: int = 64, live: bool | None = None,
) -> Any:  # fmt: skip
    """Return a picture of one step below sliders for hosts and virtual batch, beside what a study measured at that size.

    Args:
        record: of a `BatchNormStudy`; None draws the step alone.
        batch_size: examples of a step, over all hosts; None is the record's.
        hosts: where the slider starts, or the largest number below that divides the batch.
        stat_examples: where the slider of the virtual batch starts (about 64 in P6.4).

    Raises:
        UsageError: there is neither a record nor a batch size, or a batch of fewer than 2 examples.

    Source: P6.3 (who is synchronised), P6.4 (virtual batches), P6.5 (apart from the batch size), P6.6 (subsamples).
    """
    if record is not None:
        needs("batch_norm_panel", record, "config", "facts")
    size = int(record.config["batch_size"]) if batch_size is None and record is not None else batch_size
    if size is None:
        raise UsageError(
            "wb.batch_norm.panel needs a record, or batch_size=..., the examples of a step over all hosts."
        )
    check_integer("batch_size", size, low=2, hint=": one example has no variance", error=UsageError)
    said = diagnosis if diagnosis is not None or record is None else diagnose_batch_norm(record)
    splits = [count for count in range(1, min(size // 2, 64) + 1) if size % count == 0]
    sizes = sorted({2**k for k in range(1, size.bit_length())} | {size})
    controls: dict[str, Control] = {
        "hosts": Choice(
            label="hosts", options=[(str(count), count) for count in splits],
            start=max((count for count in splits if count <= hosts), default=1),
        ),
        "stat_examples": Choice(
            label="virtual batch", options=[(f"{each:,}", each) for each in sizes],
            start=max((each for each in sizes if each <= stat_examples), default=sizes[0]),
        ),
    }  # fmt: skip

    def answer(hosts: int, stat_examples: int) -> Answer:
        layout = statistics_layout(size, hosts, stat_examples)
        step: Draw = lambda ax: plot_batch_norm_layout(layout, ax=ax)  # noqa: E731 - an answer holds functions
        if record is None or said is None:
            return Answer(layout.words, [step])
        measured = lambda ax: plot_batch_norm(record, said, mark=layout.examples, ax=ax)  # noqa: E731
        return Answer(
            f"{layout.words}\n{_trained_words(said, layout.examples, str(record.config['select']))}", [step, measured]
        )

    return controls_panel(
        "batch_norm_panel", answer, controls, alt=ALT, live=live, size=(4.9 if record is not None else 7.0, 3.9)
    )


def _trained_words(said: Diagnosis, examples: int, select: str) -> str:
    """Say what was trained with statistics from so many examples, by the rows of `batch_norm.ghost_size`."""
    rows = said["batch_norm.ghost_size"].evidence.get("arms") if "batch_norm.ghost_size" in said else None
    row = next((row for row in rows or () if int(row["statistic"]) == examples), None)
    if row is None:
        return f"No trial had statistics from {examples:,} examples: wb.batch_norm.Study(stat_examples=[{examples}]) trains some."
    spread = "" if math.isnan(number(row["se"])) else f" ± {short(number(row['se']))}"
    return f"Trained with statistics from {examples:,} examples at a batch of {row['batch_size']:,}: {select} {short(number(row['mean']))}{spread} over {len(row['values'])} seeds."
