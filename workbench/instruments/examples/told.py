"""`told`: what the examples that were seen of a loop tell of its data, as the facts that `topics/data` judges."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from workbench.instruments.examples.seen import TARGETS, Batch, Examples
from workbench.instruments.examples.sizes import CATEGORIES, sample_facts
from workbench.instruments.losses.ranges import REFUSED, ideals_of, reachable
from workbench.instruments.norms import sizes_of
from workbench.instruments.surroundings import Loaders

FEWEST, RISING, ENDS = 40, 0.99, 5
"""Examples that it takes, share of steps in one direction of what is sorted, and pairs of batches that tell whether an order goes on from one to the next (rules of thumb)."""
_OWN, _AGAIN = 0.5, 0.5
_CLEAR = 8.0
"""Matches that a part of what is evaluated would have at the rate of the whole, and has none: it is validation data (chance leaves it none once in 3,000)."""
_DRIFT = 0.15
"""Distance between the first and the last half of what is trained on, from which on they are no sample of it all (as `diagnose_data`'s `small_shift`)."""
_CHANCE, _MANY = 1e-4, 1.5
"""Chance of such a distance, and times by which deviations of the splits differ, or deviations by which their means do, where they are prepared otherwise (rules of thumb)."""
_SHOWN = 256
"""First outputs by which ranges and sizes are told (rule of thumb)."""
_FITTED, _SURE = 500, 8.0
"""Examples that simple models are fitted to, which takes some tenths of a second at the end of a run, and deviations of chance from which on they have found something (rules of thumb)."""


def told(examples: Examples, loaders: Loaders) -> dict[str, Any]:
    """Return JSON facts: "evaluated" (see `_evaluated`) and, where inputs were kept, those of `collect_data` as far as a sample tells them."""
    first = _first_epoch(examples.trained)
    trained = set().union(*map(_digests, first))
    groups = _groups(examples, loaders, trained)
    found: dict[str, Any] = {"evaluated": _evaluated(groups, trained, any_seen=bool(examples.evaluated))}
    batches = _first_epoch(_alike(examples.trained))
    if sum(map(_kept, batches)) < FEWEST:
        return found
    train = _table(batches)
    whole = [group for group in groups.values() if _size(group) >= _size(first)]  # it may be the training split
    lines = {group[0].source.line for group in whole if len(group) > 1 and group[0].source.loader is None}
    fewer = [b for group in groups.values() if group not in whole for b in group if b.source.line not in lines]
    found["near"] = _near(train, [b for b in fewer if b.source.update == fewer[0].source.update])
    held = [_table(_alike(group)) for group in groups.values() if sum(map(_kept, group)) >= 2]
    return found | _facts(examples, loaders, batches, train, max(held, key=lambda t: len(t[0]), default=None))


Table = tuple[Tensor, Tensor | None]


def _facts(examples: Examples, loaders: Loaders, batches: list[Batch], train: Table, held: Table | None) -> dict[str, Any]:  # fmt: skip
    from workbench.instruments.examples.rows import exact_hashes, repeats, split_sample
    from workbench.instruments.examples.yardsticks import input_shift, measure, target_shift

    def sample(table: Table) -> Any:
        data = TensorDataset(*(part for part in table if part is not None))
        return split_sample(data, split="train", most=None, memory_mb=64.0)

    (x, y), half, ours, theirs = train, len(train[0]) // 2, sample(train), None if held is None else sample(held)
    rows = [loaders.row(batch.source.loader) for batch in batches]
    random, weighted = (all(row.get(name) for row in rows) for name in ("random", "weighted"))
    once = (random and not weighted) or all(row and not row["shuffled"] for row in rows)
    single = None if y is None or y.shape[1] > 1 else y[:, 0].numpy()
    counts = Counter() if single is None or single.dtype.kind == "f" else Counter(single.tolist())
    order = None if random or single is None else _order(batches, single, held)
    stored = None if order is None or single is None else single.astype(np.float64)
    several, beside = (any(getattr(batch, name) for batch in batches) for name in ("several", "beside"))
    sticks: dict[str, Any] = {} if several else measure(ours, theirs, stored=stored, most=_FITTED)
    if several or (beside and "constant" in sticks):
        sticks = {"reason": "the model takes several inputs"}
    elif beside:  # what the largest one does not tell of a label another may
        sticks |= {"ranks": None, "strangers": None, "beside": True}
    if theirs is not None and "own" not in sticks and max(sticks.get("z", {"": _SURE}).values()) < _SURE:
        sticks["own"] = measure(theirs, most=_FITTED)
    shift: dict[str, Any] = {}
    if held is not None and theirs is not None:
        first, last = (sample((x[part], None if y is None else y[part])) for part in (slice(half), slice(half, None)))
        halves = [] if random else [input_shift(first, last), target_shift(first, last)]
        moved, later = _moved(x, held[0]), _table(_alike(examples.trained))[1]
        a, b = (sample((part[:, moved] if x.dim() == 2 and len(moved) else part, None)) for part in (x, held[0]))
        new = bool(counts) and later is not None and not set(later.flatten().tolist()) <= set(counts)
        worst = [(test, each.get("tests", 1)) for each in halves for test in each.get("worst", [each] if "p" in each else [])]  # fmt: skip
        shift = {
            "inputs": input_shift(a._replace(columns=moved[a.columns] if x.dim() == 2 else a.columns), b) if len(moved) else {"reason": "inputs lie in the same place and on the same scale in both splits"},
            "targets": {"reason": "a sampler weighs the examples of training"} if weighted and counts else target_shift(ours, theirs),
            "drifts": new or any(test["distance"] >= _DRIFT and test["p"] * tests < _CHANCE for test, tests in worst),
        }  # fmt: skip
    return {
        "examples": {"train": len(x), "validation": 0 if held is None else len(held[0])}, "one_pass": len(batches) == len(_alike(examples.trained)), "order": order, "yardsticks": sticks, "shift": {"validation": shift} if shift else {},
        "nonfinite": {name: int((~torch.isfinite(part)).sum()) for name, part in (("inputs", x), ("targets", y)) if part is not None},
        "padding": _padding(batches),
        "classes": dict(counts.most_common()) if len(counts) <= max(2, len(x) / 2) else {},
        "repeats": repeats(exact_hashes(x.flatten(1).numpy()), single if counts else None) if once else None,
        **sample_facts(ours), **_loss(examples, x, y),
    }  # fmt: skip


def _moved(x: Tensor, other: Tensor) -> NDArray[np.intp]:
    """Return the columns of two tables, or 0 for all of what is no table, whose numbers are of another size, or lie elsewhere, by more than an augmentation of one split makes."""
    a, b = (part.double() if part.dim() == 2 else part.double().reshape(-1, 1) for part in (x, other))
    if a.shape[1] != b.shape[1]:
        return np.arange(0)
    size, ratio = a.std(0), b.std(0) / a.std(0)  # of what varies in both
    far = (b.mean(0) - a.mean(0)).abs() > _MANY * size
    moved = (far & (ratio > 0)) | ((ratio > 0) & (ratio < 1 / _MANY)) | ((ratio > _MANY) & (ratio < torch.inf))
    return np.flatnonzero(moved.numpy())


def _padding(batches: list[Batch]) -> dict[str, Any] | None:
    """Return the class that targets have where token sequences are filled up to one length, and nowhere else, and its share; None where there is none."""
    known = [(b.inputs.cpu(), b.answers.cpu()) for b in batches if b.inputs is not None and b.answers is not None]
    plain = [(x, y) for x, y in known if x.dim() == 2 and y.shape[1] == min(x.shape[1], TARGETS) > 1 and not (x.is_floating_point() or y.is_floating_point())]  # fmt: skip
    if not plain or len(plain) < len(batches):
        return None
    filler = torch.cat([x[:, -1] for x, _ in plain]).mode().values
    ends = [(x == filler).flip(1).cumprod(1).flip(1).bool()[:, : y.shape[1]] for x, y in plain]
    filled, others = (torch.cat([y[e == side] for e, (_, y) in zip(ends, plain, strict=True)]).tolist() for side in (True, False))  # fmt: skip
    tokens = torch.cat([x[:, : y.shape[1]][~end] for end, (x, y) in zip(ends, plain, strict=True)]).tolist()
    lengths = [n for end in ends for n in end.sum(1).tolist()]
    if len(set(lengths)) < 3 or len(set(filled)) != 1 or filled[0] < 0:
        return None
    if max(others.count(filled[0]), tokens.count(int(filler))) > len(lengths):  # one of each may end a sequence
        return None
    return {"class": filled[0], "share": len(filled) / (len(filled) + len(others))}


def _size(batches: Sequence[Batch]) -> int:
    return sum(batch.source.size for batch in batches)


def _kept(batch: Batch) -> int:
    return 0 if batch.inputs is None else len(batch.inputs)


def _shape(batch: Batch) -> Any:
    """Return what inputs have in common that can be rows of one table: tokens may be fewer or more."""
    assert batch.inputs is not None
    numbers = batch.inputs.is_floating_point()
    return numbers, batch.inputs.dim(), batch.inputs.shape[1:] if numbers or batch.inputs.dim() != 2 else ()


def _alike(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches whose inputs are of the most common kind."""
    kept = [batch for batch in batches if batch.inputs is not None]
    common = Counter(_shape(batch) for batch in kept).most_common(1)
    return [batch for batch in kept if _shape(batch) == common[0][0]]


def _first_epoch(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches before the first one whose examples were seen before, or that is of another pass through its loader."""
    found: list[Batch] = []
    seen: set[int] = set()
    for batch in batches:
        if found and batch.source.loader is not None and batch.source.epoch != found[0].source.epoch:
            break
        rows = _digests(batch)
        if batch.source.loader is None and rows and len(rows & seen) > _AGAIN * len(rows):
            break
        seen |= rows
        found.append(batch)
    return found


def _table(batches: Sequence[Batch]) -> Table:
    """Return inputs and targets, whole numbers as integers where they are classes; no targets where some have none, or all batches have the same ones."""
    inputs = [batch.inputs.cpu() for batch in batches if batch.inputs is not None]
    if inputs[0].dim() == 2 and len({part.shape[1] for part in inputs}) > 1:
        widest = max(part.shape[1] for part in inputs)
        inputs = [F.pad(part, (0, widest - part.shape[1])) for part in inputs]
    x = torch.cat(inputs)
    x = x.float() if x.is_floating_point() else x
    answers = [batch.answers for batch in batches]
    known = [each.cpu() for each in answers if each is not None]
    if len(known) < len(answers) or len({(each.shape[1], each.is_floating_point()) for each in known}) > 1:
        return x, None
    places = len(known) > 2 and all(torch.equal(k, known[0][: len(k)]) for k in known)  # as pairs are told by
    if places and bool((known[0] != known[0][0]).any()):
        return x, None
    y = torch.cat(known)
    if y.shape[1] > 1 and bool(((y == 0) | (y == 1)).all() & (y.sum(1) == 1).all()):
        return x, y.argmax(1, keepdim=True)
    few = y.shape[1] == 1 and bool((y == y.round()).all()) and len(np.unique(y.numpy())) <= CATEGORIES
    return x, y.long() if few or not y.is_floating_point() else y.float()


def _groups(examples: Examples, loaders: Loaders, trained: set[int]) -> dict[Any, list[Batch]]:
    """Return the passes of the first evaluation of each split, those on the training set apart."""
    groups: dict[Any, list[Batch]] = {}
    for batch in examples.evaluated:
        loader = batch.source.loader
        if (batch.measures or loader is not None) and not loaders.is_trained_on(loader):
            groups.setdefault(batch.source.place, []).append(batch)
    wholes = {key: set().union(*map(_digests, group)) for key, group in groups.items()}
    groups = {key: group for key, group in groups.items() if len(wholes[key] & trained) <= _OWN * max(len(trained), 1)}
    return {key: [b for b in group if b.source.update == group[0].source.update] for key, group in groups.items()}


def _digests(batch: Batch) -> set[int]:
    return set() if batch.digests is None else set(batch.digests.tolist()) - {0}


def _evaluated(groups: dict[Any, list[Batch]], trained: set[int], *, any_seen: bool) -> dict[str, Any] | None:
    """Return how many examples that are evaluated were among the first that were trained on; None where that cannot be told."""
    wholes = {key: set().union(*map(_digests, group)) for key, group in groups.items()}
    every = set().union(*wholes.values())
    if not trained or not any_seen:
        return None
    hits = len(every & trained)
    # without a loader one line may evaluate several splits
    passes = [_digests(batch) for key in wholes if key[0] is None for batch in groups[key]]
    clear = any(len(rows) * hits > _CLEAR * len(every) and not rows & trained for rows in [*wholes.values(), *passes])
    line = max(wholes, key=lambda key: len(wholes[key] & trained), default=("",))[-1]
    return {"trained": len(trained), "evaluated": len(every), "both": hits, "clear": clear, "line": line}


def _near(train: Table, evaluated: list[Batch]) -> dict[str, Any] | None:
    """Return how many of some examples that are evaluated are near copies of those trained on; None where that cannot be told."""
    from workbench.instruments.examples.near import near_copies

    (x, y), kept = train, [b for b in evaluated if b.inputs is not None and not (b.several or b.beside)]
    kept = [b for b in kept if b.inputs is not None and b.inputs.shape[1:] == x.shape[1:]]
    rows, answers = _table(kept) if kept else (x, None)
    if y is None or answers is None or answers.shape[1] != y.shape[1] or not x.is_floating_point():
        return None
    some = np.linspace(0, len(rows) - 1, min(len(rows), _FITTED)).astype(int)
    parts = [part.flatten(1).numpy() for part in (x.double(), y, rows[some].double(), answers[some])]
    copies = near_copies(*parts, table=x.dim() == 2)
    place = np.repeat(np.arange(len(kept)), list(map(_kept, kept)))[some]
    each, hits = (np.bincount(found, minlength=len(kept)) for found in (place, place[copies]))
    clear = bool(((each * copies.mean() > _CLEAR) & (hits == 0)).any())
    line = kept[int(hits.argmax())].source.line
    return {"trained": len(x), "evaluated": len(some), "both": int(copies.sum()), "clear": clear, "line": line}


def _order(batches: Sequence[Batch], labels: NDArray[Any], held: Table | None) -> dict[str, Any]:
    """Return the order of the targets; numbers that rise and fall are in none, and neither are classes that a sampler puts together batch by batch."""
    from scipy.stats import binom

    from workbench.instruments.examples.orders import label_order

    n = len(labels)
    found: dict[str, Any] = {"examples": n, "neighbours": 0.0, "neighbours_p": 1.0, "drift_p": None}
    values, counts = np.unique(labels, return_counts=True)
    if labels.dtype.kind == "f":
        steps = np.diff(labels)
        if max((steps >= 0).mean(), (steps <= 0).mean()) >= RISING and n >= 2 * FEWEST:
            found |= {"neighbours": 1.0, "neighbours_p": 0.0, "by": "target"}
    elif len(values) < 2:
        others = None if held is None or held[1] is None else held[1][:, 0].numpy()
        share = 1.0 if others is None else float((others == values[0]).mean())
        found |= {"neighbours": float(share < 1), "neighbours_p": share**n}
    else:
        found = label_order(labels) | {"drift_p": None}
        runs = 1 + int((np.diff(labels) != 0).sum())
        cuts = np.cumsum([_kept(batch) for batch in batches])[:-1]
        if runs > 2 * len(values):
            chance, agree = float(((counts / n) ** 2).sum()), int((labels[cuts - 1] == labels[cuts]).sum())
            carried = (agree / len(cuts) - chance) / (1 - chance) if len(cuts) >= ENDS else 0.0
            p = float(binom.sf(agree - 1, len(cuts), chance)) if len(cuts) >= ENDS else 1.0
            found |= {"neighbours": min(found["neighbours"], carried), "neighbours_p": max(found["neighbours_p"], p)}
    return {"source": "loop", "examples": n, "indices": None, "stored_labels": None, "epochs": None, "labels": found}


_NAMED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip
"""Loss functions whose ideal outputs are known."""


def _constant(name: str, outputs: Tensor, target: Tensor, y: Tensor, loss: float) -> float | None:
    """Return what the best constant output costs; None where the first loss is not the plain mean, as with weights or label smoothing."""
    with contextlib.suppress(*REFUSED):
        given = target.float().reshape(outputs.shape) if target.is_floating_point() else target
        if not np.isclose(float(getattr(F, name)(outputs, given)), loss, rtol=1e-4):
            return None
        classes = name.startswith(("cross_entropy", "binary")) and not y.is_floating_point()
        if (classes and (name == "cross_entropy" or y.shape[1] == 1)) or (name == "mse_loss" and y.shape[1] < TARGETS):
            cost = _entropy if classes else lambda part: float(part.double().var(0).mean())
            whole, *halves = map(cost, (y, *y.tensor_split(2)))
            return whole if max(halves) - min(halves) <= _DRIFT * whole else None  # else it is no sample of them all
    return None


def _entropy(y: Tensor) -> float:
    """Return the entropy of classes, in nats, with the correction for a sample of n among k: (k - 1) / (2 n) (Miller 1955)."""
    counts = torch.unique(y[y >= 0], return_counts=True)[1].double()  # below 0 are those that are left out
    shares = counts / counts.sum()
    return float(-torch.xlogy(shares, shares).sum() + (len(counts) - 1) / (2 * counts.sum()))


def _loss(examples: Examples, x: Tensor, y: Tensor | None) -> dict[str, Any]:
    """Return what the last operation of the model can reach, the size of targets and of first outputs and their loss, and the loss of one and the same output."""
    seen, name = examples.criterion, examples.criterion.get("name", "")
    name = "cross_entropy" if name == "nll_loss" and seen["head"] == "LogSoftmax" else name  # of logarithms the same
    trained: dict[str, Any] = {"alone": bool(examples.alone), "constant": None, "losses": [(update, float(loss)) for update, loss in examples.losses]}  # fmt: skip
    if name not in _NAMED:
        return {"range": None, "scale": {}, "trained": trained, "fresh": None}
    outputs, target, span = seen["outputs"].cpu().float(), seen["target"].cpu(), seen["span"]
    if seen["loss"] is not None and y is not None:
        trained["constant"] = _constant(name, outputs, target, y, float(seen["loss"]))
    outputs, target, scale = outputs[:_SHOWN], target[:_SHOWN], {}
    if examples.sizes:
        first, wanted = (each.cpu().double() for each in examples.sizes)
        size = {"outputs": float(first.square().mean().sqrt())}
        scale = {"targets": sizes_of(wanted.reshape(len(wanted), -1).numpy()) | size}

    def at(values: Tensor) -> Tensor:
        given = target.float().reshape(values.shape) if target.is_floating_point() else target
        losses: Tensor = getattr(F, name)(values, given, reduction="none")
        return losses.reshape(len(losses), -1).mean(1)

    known = {"kind": None, "head": seen["head"], "range": span and list(span)}
    spreads = [
        {"update": update, "spread": float(spread), "size": float(size)} for update, spread, size in examples.spreads
    ]
    vary = {"outputs": outputs[:1].numel(), "mean": float(outputs.mean()), "inputs_vary": bool((x != x[:1]).any())}
    fresh: dict[str, Any] | None = None
    with contextlib.suppress(*REFUSED):
        told = {"loss": float(at(outputs).mean()), "spreads": [vary | each for each in spreads]}
        fresh = told if spreads else None  # of one example at a time nothing is known of differences between them
    reached = known | (reachable(at, ideals_of(target, outputs), span or (-np.inf, np.inf)) or {})
    return {"range": reached, "scale": scale, "trained": trained, "fresh": fresh}
