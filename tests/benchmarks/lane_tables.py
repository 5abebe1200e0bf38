"""The table of `bench_lanes.py`, one row a side and number of lanes, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bare import Seconds
from timing import median, ratio

__all__ = ["HEADER", "Row", "row_text"]

HEADER = """\
| lanes | | training, s | / ours | study, s | / ours | GFLOP/s | of a bare product |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


class Row(NamedTuple):
    """What a row is made of.

    Attributes:
        lanes: trials of the study.
        name: of the side.
        seconds: of its rounds, for all lanes.
        operations: of one round; None where it is not known how many were made.
    """

    lanes: int
    name: str
    seconds: Sequence[Seconds]
    operations: float | None


def row_text(row: Row, ours: Sequence[Seconds], bare_rate: float) -> str:
    """Return the row: medians, and ratios over the rounds that both sides have.

    Args:
        row: the side.
        ours: lanes with gradients="auto", as many.
        bare_rate: GFLOP/s of a bare matrix product.
    """
    cells = [str(row.lanes), row.name]
    for kind in ("training", "whole"):
        mine = [getattr(seconds, kind) for seconds in ours]
        theirs = [getattr(seconds, kind) for seconds in row.seconds]
        both = min(len(mine), len(theirs))
        cells.append(f"{median(theirs):.3g}")
        cells.append("1" if row.seconds is ours else ratio(theirs[:both], mine[:both], digits=2))
    if row.operations is None:
        cells += ["", ""]
    else:
        rate = row.operations / median([seconds.training for seconds in row.seconds]) / 1e9
        cells += [f"{rate:.3g}", f"{100 * rate / bare_rate:.0f} % of {bare_rate:.3g}"]
    return f"| {' | '.join(cells)} |"
