"""`collect_data` and `audit_data`: the facts for `diagnose_data`, from a workload, whose parts of an item are told apart, or a loader."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Subset

from workbench.checks import check_integer
from workbench.errors import UsageError
from workbench.findings.audited import Audit
from workbench.instruments.examples.rows import Sample, exact_hashes, fetch_rows, read_rows, split_sample
from workbench.instruments.examples.sizes import input_scale, sample_facts
from workbench.instruments.examples.yardsticks import input_shift, measure, target_shift
from workbench.topics.data.order import loader_order, probe_workers, stream_order, trainer_order
from workbench.topics.data.overlap import find_overlap, joined
from workbench.topics.data.scale import codes_in_the_model, far_in_the_model, model_scale
from workbench.topics.one_batch.batch import OneBatch, first_batch
from workbench.train.rng import isolated_rng, seed_all
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order, length_of

MANY_CLASSES = 1000
PROBED = 8  # examples that are read again to see whether items are random (rule of thumb)
LARGEST = 10_000_000  # examples of a dataset whose order is looked up, at most


def audit_data(
    data: Workload | DataLoader[Any] | Any,
    *,
    validation: Any = None,
    test: Any = None,
    max_examples: int | None = None,
    near: bool = True,
    memory_mb: float = 256.0,
) -> Audit:
    """Look at data before training on them: overlap of the splits, order, classes, scale, workers. Nothing is trained.

    Args:
        data: a workload, the `DataLoader` that you train with, or a dataset; a loader's order is observed over two epochs.
        validation: dataset or loader of the validation split, where `data` is no workload.
        max_examples: read of each split, at most, the first ones; None is all.
        near: look for near duplicates too, not for exact ones alone.
        memory_mb: of the rows that are in memory at a time, in units of 1e6 bytes.

    Returns:
        What was found; `diagnose_data` judges it.

    Raises:
        UsageError: `data` is none of these, or splits are given twice.
        ConfigError: a setting is out of its range.
        DataError: an item raised; its index is named.
    """
    if max_examples is not None:
        check_integer("max_examples", max_examples, low=2, hint=", or None for all")
    limits: dict[str, Any] = {"max_examples": max_examples, "near": near, "memory_mb": memory_mb}
    if isinstance(data, Workload):
        if validation is not None or test is not None:
            raise UsageError("a workload has its splits: leave validation= and test= out, or pass a loader instead.")
        return Audit(facts={"data": collect_data(data, **limits)}, workload=data.name)
    if not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")) or isinstance(data, (str, bytes, dict)):
        raise UsageError(
            f"data must be a Workload, a DataLoader or a dataset, not {type(data).__name__} ({str(data)[:60]}). "
            "Give the loader that you train with."
        )
    others = {"validation": validation, "test": test}
    splits = {name: d.dataset if isinstance(d, DataLoader) else d for name, d in others.items() if d is not None}
    loader = data if isinstance(data, DataLoader) else None
    found = _facts(data.dataset if loader is not None else data, splits, loader=loader, **limits)
    return Audit(facts={"data": found}, workload=type(getattr(data, "dataset", data)).__name__)


def collect_data(
    workload: Workload,
    *,
    device: torch.device | None = None,
    max_examples: int | None = 20_000,
    near: bool = True,
    memory_mb: float = 256.0,
) -> dict[str, Any]:
    """Return JSON facts for `diagnose_data`; the caller's random state is left bit for bit as it was.

    Args:
        max_examples: read of each split, at most.
        memory_mb: of the rows that are in memory at a time, in units of 1e6 bytes.
    """
    device = device or torch.device("cpu")
    splits = paired(workload, device)
    train = splits.pop("train")
    found = _facts(
        train, splits, workers=workload.num_workers, max_examples=max_examples, near=near, memory_mb=memory_mb
    )
    with isolated_rng():
        seen = model_scale(workload, device, most=max_examples)
        if "inputs" in found["far"]:
            inputs = found["far"]["inputs"]
            inputs["far"] = far_in_the_model(workload, device, inputs["far"], most=max_examples)
        found["codes"] = codes_in_the_model(workload, device, found["codes"], most=max_examples)
    found["scale"] = (found["scale"] if seen.pop("unseen", False) else {}) | seen
    return found | {"target_part": train.target if isinstance(train, Paired) else 1}


def _facts(
    train: Any, others: dict[str, Any], *, loader: DataLoader[Any] | None = None, workers: int | None = None,
    max_examples: int | None, near: bool, memory_mb: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the facts; `workers` is how many this package's own trainer starts, None where it does not train on them."""
    size, is_stream = memory_mb / 8, in_its_own_order(train)
    with isolated_rng():
        order: dict[str, Any] | None = None
        kept: Any = train
        if is_stream:
            order, rows = stream_order(train if loader is None else loader, max_examples=max_examples or 200_000)
            labels = rows.labels
            kept = list(zip(rows.inputs, itertools.repeat(None) if labels is None else labels, strict=False))
        else:
            labels = joined([rows.labels for rows in read_rows(train, memory_mb=size, first=max_examples)])
            if loader is not None:
                order = loader_order(loader, max_examples=max_examples or 20_000)
            elif workers is not None:
                order = trainer_order(train, labels)
        streams = {n: d for n, d in others.items() if in_its_own_order(d)}
        held = others | {n: list(itertools.islice(d, max_examples)) for n, d in streams.items()}
        reading = _reading(kept)
        samples = {
            name: split_sample(data, split=name, most=max_examples, memory_mb=size)
            for name, data in {"train": kept, **held}.items()
        }
        sample, overlap = samples.pop("train"), None
        if reading in ("fixed", "augmented") and kept:
            steady: Any = (lambda data: data) if reading == "fixed" else _Steady
            alike = {name: steady(data) for name, data in held.items()}
            overlap = find_overlap(steady(kept), alike, near=near, memory_mb=memory_mb, max_rows=max_examples)
        count = loader.num_workers if loader is not None else workers or 0
        draws = None  # of a stream in workers nobody can ask for one example twice
        if not is_stream or not count:
            draws = probe_workers(train, num_workers=count, like=loader)
        return {
            "examples": {"train": length_of(train) or len(kept), **{name: length_of(d) or 0 for name, d in others.items()}},
            "read": len(kept) if max_examples is None else min(len(kept), max_examples), "reading": reading, "overlap": overlap,
            "order": order, "classes": _class_counts(labels), "stream": is_stream, **sample_facts(sample),
            "scale": input_scale(sample),
            "shift": {name: {"inputs": input_shift(sample, s), "targets": target_shift(sample, s)} for name, s in samples.items()},
            "yardsticks": _yardsticks(kept, sample, labels, held.get("validation"), samples.get("validation")),
            "workers": draws,
        }  # fmt: skip


class _Steady:
    """A map-style dataset of which each item is read under the same random state: random augmentation does the same to all."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        seed_all(0)
        return self.data[index]


def _reading(data: Any) -> str:
    """Return how items are read: "fixed"; "augmented" (the same under one random state); "drawn" (all alike under it); "random"."""
    places, steady = range(min(PROBED, len(data))), _Steady(data)

    def few(source: Any) -> list[int]:
        return [int(each) for each in exact_hashes(fetch_rows(source, places).inputs)]

    if not len(data) or few(data) == few(data):
        return "fixed"
    if (once := few(steady)) != few(steady):
        return "random"
    return "drawn" if len(once) > 1 and len(set(once)) == 1 else "augmented"


def _yardsticks(
    train: Any, sample: Sample, labels: NDArray[Any] | None, other: Any, held: Sample | None
) -> dict[str, Any]:
    """Return what `measure` finds; examples stand next to each other where they do in the dataset that the splits were cut from."""
    if labels is None or labels.dtype.kind not in "iubf":
        return measure(sample, held)
    if type(train) is not Subset or len(train.dataset) > LARGEST:  # type: ignore[arg-type]
        return measure(sample, held, stored=labels.astype(np.float64))
    stored = np.full(len(train.dataset), np.nan)  # type: ignore[arg-type]
    stored[np.asarray(train.indices)[: len(labels)]] = labels
    if type(other) is Subset and other.dataset is train.dataset and held is not None and held.targets is not None:
        stored[np.asarray(other.indices)[held.places]] = held.targets[:, 0]
    return measure(sample._replace(places=np.asarray(train.indices)[sample.places]), held, stored=stored)


def _class_counts(labels: NDArray[Any] | None) -> dict[str, int] | None:
    """Return examples per class, most common first; None where labels are no classes."""
    if labels is None or labels.dtype.kind == "f" or not len(labels):
        return None
    counts = Counter(labels.tolist())
    many = len(counts) > min(MANY_CLASSES, max(2, len(labels) / 2))
    return None if many else {str(label): int(count) for label, count in counts.most_common()}


class Paired(Dataset[Any]):
    """A dataset whose items are (inputs, target): the parts at the places `inputs`, several as a tuple, and at `target`, if any, of another one's."""

    def __init__(self, data: Any, inputs: Sequence[int], target: int | None) -> None:
        self.data, self.inputs, self.target = data, tuple(inputs), target

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return item `index` as (inputs, target), or (inputs,)."""
        item = self.data[index]
        numbers = (bool, int, float, np.number)
        found = [item[place] for place in self.inputs]
        parts = tuple(torch.as_tensor(v) if isinstance(v, numbers) else v for v in found)
        given = parts[0] if len(parts) == 1 else parts
        return (given,) if self.target is None else (given, item[self.target])


def paired(workload: Workload, device: torch.device) -> dict[str, Any]:
    """Return the splits of a workload, with items as pairs of what the model reads and the target.

    A part whose rows are exchanged between examples is an input where that changes the outputs, else a target where it changes the
    loss. Two parts are (inputs, target), unless both are inputs alone, as of two pictures that are compared; so is everything where this
    cannot be asked. Items may be (users, items, ratings), (inputs, mask, targets) or (inputs, targets, weights).
    """
    splits = dict(workload.splits)
    if workload.collate is not None or in_its_own_order(workload.train_data):
        return splits
    try:
        with isolated_rng():
            item: Any = workload.train_data[0] if len(workload.train_data) else ()
            several = isinstance(item, (tuple, list)) and len(item) > 1
            if not several or (len(item) == 2 and np.shape(item[0]) != np.shape(item[1])):
                return splits
            inputs, targets = _roles(first_batch(workload, workload.config.replace(bn_stat_examples=None), device))
    except Exception:  # the person's own code, asked in a way it was not made for
        return splits
    target = next((place for place in targets if place not in inputs), None)
    if (len(item) == 2 and (inputs != [0, 1] or targets)) or (len(item) > 2 and (not inputs or target is None)):
        return splits
    if (inputs, target) == ([0], 1):
        return splits
    return {name: data if in_its_own_order(data) else Paired(data, inputs, target) for name, data in splits.items()}


def _roles(one: OneBatch) -> tuple[list[int], list[int]]:
    """Return the places of the parts that change the outputs, and of those that change the losses of given outputs."""
    outputs = one.forward()
    own, losses = one.flat(outputs), one.losses(outputs)
    inputs, targets = [], []
    for place in range(len(one.batch)):
        moved = list(one.batch)
        moved[place] = tree_map(lambda t: t.roll(1, 0) if one.has_rows(t) else t, moved[place])
        if not torch.equal(one.flat(one.forward(moved)), own):
            inputs.append(place)
        if not torch.equal(one.losses(outputs, moved), losses):
            targets.append(place)
    return inputs, targets
