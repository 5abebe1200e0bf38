"""`Schedulers` and `Loaders`: how a loop steps its learning-rate schedulers and draws its batches."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from workbench.instruments.caller import begins_at, own_line
from workbench.workloads.items import length_of

MAX_PRINTS, MAX_WEIGHTS, MAX_METRICS = 200, 1_000_000, 1000
_HORIZONS = ("total_steps", "T_max", "T_0", "total_iters", "step_size")


_RANDOM = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)


class Schedulers:
    """Counts the calls of each scheduler, and reads after how many of them it is through."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[str, Any]] = {}
        self._alive: dict[int, Any] = {}

    def stepped(self, scheduler: Any, updates: int, metric: Any = None, *, skipped: bool = False) -> bool:
        """Take in a call of `step`, with its metric where it takes one; False for the one that a scheduler makes when it is built."""
        key = id(scheduler)
        if key not in self._alive:
            self._alive[key] = scheduler  # held, so that no other takes its identity
            self._seen[key] = {
                "name": type(scheduler).__name__, "calls": 0, "before_first_update": 0, "line": "", "horizon": _horizon(scheduler),
                "decay": _decay(scheduler), "rises": _rises(scheduler), "updates_at_horizon": None,
                "mode": getattr(scheduler, "mode", None) if isinstance(scheduler, ReduceLROnPlateau) else None, "metrics": [], "lrs": [],
            }  # fmt: skip
            if getattr(scheduler, "last_epoch", 1) == 0:
                return False
        found = self._seen[key]
        found["calls"] += 1
        found["before_first_update"] += updates == 0 and not skipped
        found["line"] = found["line"] or own_line()
        if found["horizon"] and found["calls"] == found["horizon"]:
            found["updates_at_horizon"] = updates
        if found["mode"] is not None and len(found["metrics"]) < MAX_METRICS:
            found["metrics"].append(float(metric))  # as the scheduler itself has just done
            found["lrs"].append(float(scheduler.optimizer.param_groups[0]["lr"]))
        return True

    def to_dict(self) -> list[dict[str, Any]]:
        """Return one row a scheduler, as JSON values."""
        return [row for row in self._seen.values() if row["calls"]]


def _horizon(scheduler: Any) -> int | None:
    for name in _HORIZONS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 0:
            return value
    marks = getattr(scheduler, "milestones", None)
    return max(marks) if marks else None


def _decay(scheduler: Any) -> float | None:
    """Return the factor of the learning rate that each of its lengths leaves, of schedulers that decay step by step."""
    gamma = getattr(scheduler, "gamma", None)
    decays = hasattr(scheduler, "step_size") or type(scheduler).__name__ == "ExponentialLR"
    return float(gamma) if decays and isinstance(gamma, (int, float)) and 0 < gamma < 1 else None


def _rises(scheduler: Any) -> bool:
    """Tell whether it is a warmup: its last factor is no smaller than its first."""
    first, last = (getattr(scheduler, f"{name}_factor", None) for name in ("start", "end"))
    return type(scheduler).__name__ == "ConstantLR" or (first is not None and last is not None and last >= first)


class Loaders:
    """Counts what is drawn from each loader, and whether updates are made on other examples than the one before."""

    def __init__(self) -> None:
        self.last: int | None = None
        self._seen: dict[int, dict[str, Any]] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._prints: list[tuple[int, Tensor]] = []  # with the update that each is of
        self._sizes: list[int] = []
        self.width = 0  # numbers of one example of what the model is given first
        self._numbers = itertools.count()  # of iterations over any loader
        self._fed: list[Tensor] = []
        self._drawn: dict[int, int] = {}  # by loader, since the last backward pass
        self._weights: dict[int, Tensor] = {}
        self._seeded: dict[int, str] = {}  # by update, the line that seeds a generator anew

    def trained(self) -> None:
        """Take in that a backward pass begins: what was drawn last is trained on."""
        if self.last is not None:
            self._seen[self.last]["trained"] += 1
        if self._drawn:
            self._drawn = {}

    def drawn(self) -> dict[int, int]:
        """Return how many batches were drawn from each loader since the last backward pass; one that is trained on gave one for the next."""
        return {key: count - (key == self.last) for key, count in self._drawn.items()}

    def is_trained_on(self, loader: int | None) -> bool:
        """Tell whether updates are made on batches of a loader."""
        return loader is not None and loader in self._seen and self._seen[loader]["trained"] > 0

    def trained_on(self) -> int | None:
        """Return the loader that most updates are made on; None where there is none."""
        best = max(self._seen, key=lambda key: self._seen[key]["trained"], default=None)
        return best if self.is_trained_on(best) else None

    def row(self, loader: int | None) -> dict[str, Any]:
        """Return what is known of a loader; nothing of none."""
        return {} if loader is None else self._seen.get(loader, {})

    def line(self, loader: int) -> str:
        """Return the line in which iteration over a loader begins first."""
        return str(self._seen[loader]["line"]) if loader in self._seen else ""

    def begins(self, loader: Any) -> None:
        """Take in that iteration over a loader begins."""
        row = self._row(loader)
        row["begun"], row["number"] = row["begun"] + 1, next(self._numbers)
        row["line"] = row["line"] or own_line()
        given = getattr(getattr(loader, "sampler", None), "weights", None)
        if row["begun"] == 1 and isinstance(given, Tensor) and given.is_cpu and given.numel() <= MAX_WEIGHTS:
            (values, counts), row["by_class"] = _weights(given, getattr(loader, "dataset", None))
            row["weights"] = [values.tolist(), counts.tolist()] if len(values) <= MAX_PRINTS else []

    def drew(self, loader: Any) -> None:
        """Take in that a batch was drawn."""
        self._row(loader)["drawn"] += 1
        self.last = id(loader)
        self._drawn[self.last] = self._drawn.get(self.last, 0) + 1

    def _row(self, loader: Any) -> dict[str, Any]:
        key = id(loader)
        ref = self._refs.get(key)
        if ref is None or ref() is not loader:
            sampler, dataset = getattr(loader, "sampler", None), getattr(loader, "dataset", None)
            data = [dataset, dataset.dataset] if isinstance(dataset, torch.utils.data.Subset) else [dataset]
            shuffled = not isinstance(sampler, torch.utils.data.SequentialSampler)
            own = type(getattr(loader, "batch_sampler", None)) is torch.utils.data.BatchSampler
            self._refs[key] = weakref.ref(loader)
            self._seen[key] = {
                "batches": length_of(loader),
                "begun": 0,
                "number": 0,
                "drawn": 0,
                "trained": 0,
                "shuffled": shuffled,
                "size": getattr(loader, "batch_size", None),
                "random": own and isinstance(sampler, _RANDOM),
                "weighted": own and isinstance(sampler, torch.utils.data.WeightedRandomSampler),
                "workers": getattr(loader, "num_workers", 0),
                "line": "",
                "made": begins_at(
                    getattr(loader, "collate_fn", None), *(getattr(type(d), "__getitem__", None) for d in data)
                ),
                "weights": [],
                "by_class": False,
            }
        return self._seen[key]

    def fed(self, given: Tensor | Sequence[Tensor]) -> None:
        """Take in the first tensor that a model is trained on, or all of its batch: a number that other examples would hardly give."""
        several = () if isinstance(given, Tensor) else given
        first = given if isinstance(given, Tensor) else next(iter(given), None)
        if first is not None and len(self._prints) < MAX_PRINTS and not self._fed:
            self._sizes.append(int(first.shape[0]) if first.ndim else 1)
            self.width = first.numel() // self._sizes[-1]
            if len(several) > 1:  # the first may be a mask, the same in every batch
                first = torch.cat([t.detach().reshape(-1)[:4096].float().to(first.device) for t in several])
            first = first.detach()
            flat = first.reshape(-1)
            flat = flat[:: max(flat.numel() // 4096, 1)]
            weights = self._weights.get(flat.numel())
            if weights is None or weights.device != flat.device:
                weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float32).sin()
                self._weights = {flat.numel(): weights}
            self._fed = [torch.dot(flat.float(), weights)]

    def seeded(self, updates: int) -> None:
        """Take in that a generator is seeded, after so many updates."""
        if len(self._seeded) < MAX_PRINTS:
            self._seeded.setdefault(updates, own_line())

    def stepped(self, updates: int) -> None:
        """Take in that an update was made, after so many others."""
        self._prints += [(updates, fed) for fed in self._fed]
        self._fed = []

    def to_dict(self) -> dict[str, Any]:
        """Return loaders, batch size and how many updates in a row saw the same examples, as JSON values."""
        values = [(update, float(p)) for update, p in self._prints]
        pairs = [a == b for (k, a), (next_k, b) in itertools.pairwise(values) if next_k == k + 1]
        size = max(set(self._sizes), key=self._sizes.count) if self._sizes else None
        return {
            "loaders": list(self._seen.values()),
            "batch_size": size,
            "compared": len(pairs),
            "same": sum(pairs),
            "distinct": len({value for _, value in values}),
            "seeded": list(Counter(self._seeded.values()).most_common(1)),
        }


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor that holds something in nested tuples, lists and mappings."""
    return next(tensors(value), None)


def tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors that hold something in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.numel() and not value.is_sparse and has_values(value):
            yield value
        return
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ():
        yield from tensors(part)


def has_values(value: Any) -> bool:
    """Tell whether a tensor holds values of its own: those that `torch.func` puts around others do not."""
    try:
        return not isinstance(value, Tensor) or value.data_ptr() >= 0
    except (RuntimeError, NotImplementedError):
        return False


def _weights(given: Tensor, dataset: Any) -> tuple[tuple[Tensor, Tensor], bool]:
    """Return the weights and how many examples have each: one a class where the dataset has `targets`, or is of tensors, and they are a function of it."""
    targets = getattr(dataset, "targets", None)
    if targets is None and isinstance(dataset, torch.utils.data.TensorDataset):
        targets = dataset.tensors[-1]
    if isinstance(targets, (list, Tensor)) and len(targets) == len(given):
        classes = torch.as_tensor(targets)
        if classes.dim() == 1 and classes.is_cpu and not classes.is_floating_point():
            pairs, counts = torch.unique(torch.stack([classes.double(), given.double()]), dim=1, return_counts=True)
            if len(pairs[0].unique()) == len(counts):
                return (pairs[1], counts), True
    values, counts = torch.unique(given, return_counts=True)
    return (values, counts), False
