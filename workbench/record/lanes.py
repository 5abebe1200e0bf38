"""How the trials of a study were trained, in one sentence."""

from __future__ import annotations

import pandas as pd

__all__ = ["how_trained"]

_WAYS = {"loop": "one after the other by plain autograd", "vmap": "by one traced program"}


def how_trained(lanes: pd.DataFrame) -> str:
    """Return how many trials trained together, by which way, why, and how much faster that was where it was measured.

    Args:
        lanes: `StudyRecord.lanes`, one row a trial.
    """
    lanes = lanes.dropna(subset=["lanes"])  # a trial may not have begun
    if lanes.empty:
        return "No trial yet."
    said = [f"{len(lanes)} trial{'s' * (len(lanes) > 1)}, up to {int(lanes['lanes'].max())} of them together."]
    for way, rows in lanes.groupby("gradients", sort=True):
        faster = rows["faster"].dropna()
        gain = f", {faster.median():.2g} times as fast as plain autograd" if way == "vmap" and len(faster) else ""
        reasons = sorted({str(reason).partition(": about")[0] for reason in rows["reason"]})
        said.append(f"{len(rows)} {_WAYS[str(way)]}{gain} ({', '.join(reasons)}).")
    return " ".join(said)
