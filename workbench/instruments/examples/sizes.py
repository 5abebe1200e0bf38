"""Tables of inputs: their size, rows far from all others, codes for missing values, and columns that give the target away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.instruments.examples.rows import Floats, Sample, chance_bits
from workbench.instruments.norms import sizes_of

APART = 10.0
"""Deviations of the others that a value lies from the nearest of them (rule of thumb: no tail leaves such a gap and repeats its end)."""
TAIL = 30.0
"""Robust deviations (of the median distance) from their median, from which on the others have a tail towards it, which may be cut off
there (rule of thumb: of 2,000 log-normal values of deviation 1 the largest lies as far)."""
LEAST, MOST_HELD = 0.001, 0.2
"""Share of a column's cells that a code makes up (rule of thumb: fewer are single rows, more are a kind of example)."""
CATEGORIES = 20  # different targets at most that are taken for classes (rule of thumb)
EXACT, ROWS, OF_A_CLASS, LEVELS = 1e-6, 64, 4, 5
"""Error, different rows, rows of each class, and values of a column that gives the target away (rules of thumb)."""
FEW = 8  # rows, or other cells of a column, from which on they have a middle and a deviation (rule of thumb)


def sample_facts(sample: Sample) -> dict[str, Any]:
    """Return JSON facts on the examples of one split: "bits", "ids", "far", "codes" and "columns" that give the target away."""
    return {
        "bits": chance_bits(sample), "ids": sample.ids, "far": far_rows(sample), "codes": missing_codes(sample), "columns": answer_columns(sample),
    }  # fmt: skip


def input_scale(sample: Sample) -> dict[str, Any]:
    """Return the size of the inputs as they are stored, as `model_scale` has it."""
    if sample.inputs is None:
        return {"reason": "the inputs are text, or of different sizes"}
    if sample.integers:
        return {"reason": "the inputs are integers, which a model looks up or scales itself"}
    return {"layer": None} | sizes_of(sample.inputs)


def far_rows(sample: Sample, *, most: int = 32) -> dict[str, Any]:
    """Return how far the rows that are farthest from the middle of the others lie, of inputs and of targets that are numbers.

    Returns:
        Under "inputs" and "targets", where there are some: "rows" that were looked at, and "far", at most `most` pairs of a place in the
        split and a distance (root mean square over columns, from their medians, in units of the median row's), the farthest first.
    """
    kinds = {"inputs": None if sample.ids else sample.inputs, "targets": None if sample.classes else sample.targets}
    found = {}
    for kind, rows in kinds.items():
        away = None if rows is None or len(rows) < FEW else relative_distances(rows, rows)
        if away is not None:
            order = np.argsort(-away, kind="stable")[:most]
            found[kind] = {"rows": len(away), "far": [[int(sample.places[i]), float(away[i])] for i in order]}
    return found


def relative_distances(rows: Floats, others: Floats) -> Floats | None:
    """Return how far rows lie from the median of others, in units of the median distance of these; None where that is 0."""
    rows, others = (np.clip(np.nan_to_num(r, nan=0.0, posinf=0.0, neginf=0.0), -1e150, 1e150) for r in (rows, others))
    middle = np.median(others, axis=0)
    away, usual = (np.sqrt(np.square(r - middle).mean(1)) for r in (rows, others))
    unit = float(np.median(usual))
    return away / unit if unit > 1e-150 else None


def missing_codes(sample: Sample, *, cells: int = 3, rows: int = 12) -> list[dict[str, Any]]:
    """Return the values that look like codes for missing ones, the most frequent first; of pictures and series, over all places.

    Zero is none: a sensor that is off, and most of a sparse column, are 0. Nor is an end of a scale that others come near.

    Returns:
        "value", "share" (of the cells of the columns where it stands), "cells", "columns", "deviations" (from the others' mean, the
        smallest of its columns), "places" of rows in the split.
    """
    if sample.inputs is None or sample.ids:
        return []
    flat = not sample.outline_names
    values = sample.inputs if flat else sample.inputs.reshape(-1, 1)
    found: dict[float, list[tuple[int, float]]] = {}
    for column, value, deviations in apart(values):
        found.setdefault(value, []).append((column, deviations))
    codes = []
    for value, known in found.items():
        held = values[:, [column for column, _ in known]] == value
        count, share = int(held.sum()), float(held.mean())
        if count < cells or not LEAST <= share <= MOST_HELD:
            continue
        places = np.flatnonzero(held.reshape(len(sample.inputs), -1).any(1))[:rows]
        codes.append({
            "value": value, "share": share, "cells": count, "columns": len(known) if flat else None,
            "deviations": min(d for _, d in known), "places": sample.places[places].tolist(),
        })  # fmt: skip
    return sorted(codes, key=lambda code: -code["share"])


def apart(values: Floats) -> Iterator[tuple[int, float, float]]:
    """Yield the ends of columns that no other finite value comes near: column, value, deviations from the mean of the others."""
    for column, cells in enumerate(values.T):
        finite = cells[np.isfinite(cells)]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
        rest = finite[(finite > low) & (finite < high)]
        if len(rest) < FEW:
            continue
        middle, mean, deviation = float(np.median(rest)), float(rest.mean()), float(rest.std())
        robust = 1.4826 * float(np.median(np.abs(rest - middle)))  # 0 where half of them are equal
        for end, nearest in ((low, float(rest.min())), (high, float(rest.max()))):
            gap, tail = abs(end - nearest), abs(nearest - middle)
            if end != 0 and gap >= APART * deviation and tail <= TAIL * robust and robust > 0:
                yield column, end, abs(end - mean) / deviation


def answer_columns(sample: Sample) -> dict[str, Any] | None:
    """Return how many different rows there are, and the columns that give the target away in all of them.

    None of too few, of several targets, and of classes where examples are no rows of a table: a pixel may be one of theirs alone.

    Of classes these are a function of the class, or of two classes have one value in all of one and never in the other, as what is known after
    the outcome alone (in half of the columns at most: an example may be empty); of numbers they are a linear function of it, or rise or fall with it and take `LEVELS` values
    or more, as a target that is rounded does.
    """
    x, y = sample.inputs, sample.targets
    if x is None or y is None or y.shape[1] > 1 or sample.ids:
        return None
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    table = np.unique(np.column_stack([x, y]), axis=0)
    x, y = table[:, :-1], table[:, -1]
    values, kinds, counts = np.unique(y, return_inverse=True, return_counts=True)
    if len(values) < (2 if not sample.outline_names else CATEGORIES + 1) or len(y) < ROWS or x.shape[1] < 2:
        return None
    if len(values) <= CATEGORIES:  # a number that is rare tells a rare class by chance
        kept = (counts >= OF_A_CLASS)[kinds]
        x, kinds = x[kept], kinds[kept]
    varies, raw = np.ptp(x, axis=0) > 0, x
    x = x - x.mean(0)
    whole = (x**2).sum(0)
    marks = np.zeros(x.shape[1], dtype=bool)
    if len(values) == 2:
        for one, rest in ((raw[kinds == 0], raw[kinds == 1]), (raw[kinds == 1], raw[kinds == 0])):
            if len(one) and len(rest):
                marks |= (one == one[0]).all(0) & (rest != one[0]).all(0)
    if len(values) <= CATEGORIES:
        sums = np.zeros((len(values), x.shape[1]))
        np.add.at(sums, kinds, x)
        explained = (sums**2 / counts[:, None]).sum(0)
    else:
        centred = y - y.mean()
        explained = (x.T @ centred) ** 2 / (centred**2).sum()
    exact = explained >= whole * (1 - EXACT)
    if len(values) > CATEGORIES:
        exact |= [
            share > 0.5 and _ordered(column, y)
            for column, share in zip(x.T, explained / np.maximum(whole, 1e-300), strict=True)
        ]
    if marks.sum() <= x.shape[1] / 2:
        exact |= marks
    found = np.flatnonzero(varies & exact)
    return {"examples": len(y), "columns": sample.columns[found[:20]].tolist(), "of": x.shape[1]}


def _ordered(column: NDArray[np.float64], y: NDArray[np.float64]) -> bool:
    """Tell whether a column never falls, or never rises, as the target rises."""
    if len(np.unique(column)) < LEVELS:
        return False
    return any(bool((np.diff(sign * column[np.lexsort((sign * column, y))]) >= 0).all()) for sign in (1, -1))
