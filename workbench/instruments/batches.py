"""`Batches`: which examples the last updates were made on, kept for those that stand out."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from workbench.instruments.surroundings import first_tensor

MEMORY = 512
"""Updates whose batches are remembered; rows are read in blocks of fewer."""
MAX_KEPT = 40
MAX_EXAMPLES = 256
WINDOW, _TOGETHER = 50, 4
"""Losses that later ones are held against, and how many of those at a time (rules of thumb)."""
_DIGESTED = 4096


class Draws:
    """What one iterator over a loader has drawn: `current` are the indices of its last batch, None where its sampler does not tell."""

    def __init__(self) -> None:
        self.ahead: deque[list[Any]] = deque()  # chosen by the sampler and not handed out yet
        self.current: list[Any] | None = None
        self.exhausted = False


def noted(batches: Iterator[list[Any]], draws: Draws) -> Iterator[list[Any]]:
    """Iterate over what a sampler chooses, and note it."""
    for batch in batches:
        draws.ahead.append(list(batch))
        yield batch


class TimedIterator:
    """A loader's iterator that says how long each batch was waited for, and which examples it holds."""

    def __init__(self, batches: Iterator[Any], loader: Any, draws: Draws, taps: Any) -> None:
        self._batches, self._loader, self._draws, self._taps = batches, loader, draws, taps

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        began, draws = time.perf_counter(), self._draws
        try:
            batch = next(self._batches)
        except StopIteration:
            self._taps.exhausted()
            draws.exhausted = True
            raise
        draws.current = draws.ahead.popleft() if draws.ahead else None
        self._taps.drew(self._loader, time.perf_counter() - began, draws, batch)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # torch's iterators have one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class Batches:
    """Notes the batch of every update, and keeps the notes of updates with an outlying loss, gradient norm or learning rate.

    A batch is known by the indices that the loader's own batch sampler chose or, where it is another, by shape and sum of the first
    values that the model was given.

    Args:
        loss_sds: distance from the median of the updates before, in their standard deviations, that makes a loss stand out.
        norm_ratio: times their median that makes a gradient norm stand out.
        lr_ratio: times that of the update before that makes a learning rate stand out (rules of thumb, all three low: notes are no alarm).
    """

    def __init__(self, *, loss_sds: float = 6.0, norm_ratio: float = 3.0, lr_ratio: float = 1.5) -> None:
        self._loss_sds, self._norm_ratio, self._lr_ratio = loss_sds, norm_ratio, lr_ratio
        self._drawn: list[tuple[weakref.ref[Draws], deque[list[Any] | None]]] = []  # who drew last stands last
        self._ahead: bool | None = None  # the loop draws one batch more than it has used, as Accelerate's does
        self._passes, self._updates, self._read = 0, 0, 0
        self._fed: tuple[list[int], Tensor | None] | None = None
        self._held: Any = None  # what a model was given in an update that is passed over
        self._fits = True  # whether batches are as large as what the sampler chose for them, as seen last
        self._notes: deque[dict[str, Any]] = deque(maxlen=MEMORY)
        self._kept: list[tuple[float, int, dict[str, Any]]] = []
        self._losses: NDArray[np.float64] = np.zeros(0)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._lr = math.nan
        self._moment: dict[str, float] | None = None

    def drew(self, draws: Draws, examples: list[Any] | None) -> None:
        """Take in that a batch of these examples was drawn."""
        if not self._drawn or self._drawn[-1][0]() is not draws:
            alive = [pair for pair in self._drawn if pair[0]() is not None]
            new = (weakref.ref(draws), deque[list[Any] | None](maxlen=MEMORY))
            self._drawn = sorted(
                alive if any(ref() is draws for ref, _ in alive) else [*alive, new], key=lambda pair: pair[0]() is draws
            )
        self._drawn[-1][1].append(examples)

    def fed(self, first: Tensor | None) -> None:
        """Take in the first tensor that a model is trained on, for its shape; its values are looked at where no sampler tells."""
        if first is None or self._fed is not None:
            return
        drawn = self._in_use()[1]
        if drawn and drawn[-1] is not None:
            self._fed = (list(first.shape), None)
            return
        self._fed = (list(first.shape), first.detach().real.reshape(-1)[:_DIGESTED].sum(dtype=torch.float32))

    def hold(self, args: Any) -> None:
        """Take in what a model is trained on in an update that is passed over, until its end: it may turn out to stand out."""
        self._held = args if self._held is None else self._held

    def evaluated(self) -> None:
        """Take in that a model ran without gradient: what was drawn last was not for training."""
        for _, drawn in self._drawn[-1:]:
            drawn.clear()

    def _in_use(self) -> tuple[Draws | None, deque[list[Any] | None]]:
        """Return who drew last of those that drew since the last update, evaluations apart, and what."""
        for ref, drawn in reversed(self._drawn):
            if drawn and (draws := ref()) is not None:
                return draws, drawn
        return None, deque()

    def backward(self) -> None:
        """Take in a backward pass."""
        self._passes += 1

    def step_begins(self, optimizer: Optimizer) -> None:
        """Read what a resumed optimizer's second moment sums to, before the first update."""
        if self._updates or self._moment is not None:
            return
        found = [s for s in optimizer.state.values() if isinstance(s, dict) and type(s.get("exp_avg_sq")) is Tensor]
        total = sum(float(s["exp_avg_sq"].sum()) for s in found)
        self._moment = {"sum": total, "steps": max((float(s.get("step", 0)) for s in found), default=0.0)}

    def skip(self, updates: int, backwards: int, open_passes: int) -> None:
        """Take in updates of which nothing is to be noted, and backward passes that were not told, some of them in an open one."""
        self._updates += updates
        if backwards:
            self._passes = open_passes

    def stepped(self, *, whole: bool = True) -> None:
        """Take in that an update was made; `whole` notes what its model was given."""
        if self._held is not None:
            if whole:
                self.fed(first_tensor(self._held))
            self._held = None
        draws, drawn = self._in_use()
        if draws is None and self._fed is None:
            self._updates, self._passes = self._updates + 1, 0
            return
        if self._ahead is None:
            self._ahead = len(drawn) == self._passes + 1
        left = [drawn.pop()] if self._ahead and drawn and draws is not None and not draws.exhausted else []
        used = list(drawn)[-max(self._passes, 1) :]
        for _, other in self._drawn:
            other.clear()
        drawn.extend(left)
        known = [part for part in used if part is not None]
        if self._fed is not None:
            self._fits = bool(known) and len(known[0]) in self._fed[0]
        fits = self._fits
        parts = known if known and len(known) == len(used) and fits else None
        self._notes.append({"update": self._updates, "parts": parts, "batch": self._fed})
        self._updates, self._passes, self._fed = self._updates + 1, 0, None

    def read(self, columns: Mapping[str, Sequence[float]]) -> bool:
        """Look at the rows of the next updates, and keep the notes of those that stand out; tell whether the loss of one does."""
        count = len(next(iter(columns.values()), ()))
        nothing = np.full(count, math.nan)
        loss, norm, lr = (np.asarray(columns.get(name, nothing), dtype=float) for name in ("loss", "grad_norm", "lr"))
        losses = self._loss_scores(loss)
        scores = np.maximum(losses, self._lr_scores(lr))
        for i in np.flatnonzero(np.isfinite(norm)):
            scores[i] = max(scores[i], self._norm_score(float(norm[i])))
        found = np.flatnonzero(scores > 1.0)
        if found.size:
            notes = {note["update"]: note for note in self._notes}
            for i in found:
                note = notes.get(self._read + int(i))
                if note is not None:
                    self._kept.append((-float(scores[i]), note["update"], note))
            self._kept = sorted(self._kept, key=lambda kept: kept[:2])[:MAX_KEPT]
        self._read += count
        return bool((losses > 1.0).any())

    def _loss_scores(self, loss: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return by how many of its limits each loss lies above `WINDOW` finite ones just before it, the same for a few in a row, 0 where fewer than 5 are known."""
        finite = np.isfinite(loss)
        known = np.concatenate([self._losses, loss[finite]])
        before = self._losses.size + np.cumsum(finite) - finite  # finite losses before each row
        self._losses = known[-WINDOW:]
        scores = np.where(finite | (before < 5), 0.0, math.inf)
        full, few = finite & (before >= WINDOW), finite & (before >= 5) & (before < WINDOW)
        if full.any():
            windows = known[before[full][::_TOGETHER, None] - np.arange(WINDOW, 0, -1)]
            level = _medians(windows)
            noise = 1.4826 * _medians(np.abs(windows - level[:, None]))
            noise = np.maximum(np.maximum(noise, 1e-3 * np.abs(level)), 1e-12)
            level, noise = (np.repeat(each, _TOGETHER)[: full.sum()] for each in (level, noise))
            scores[full] = np.maximum((loss[full] - level) / (self._loss_sds * noise), 0.0)
        for i in np.flatnonzero(few):  # a call of NumPy costs more than so few numbers
            seen = known[: before[i]].tolist()
            level = median(seen)
            noise = 1.4826 * median(abs(value - level) for value in seen)
            scores[i] = max((float(loss[i]) - level) / (self._loss_sds * max(noise, 1e-3 * abs(level), 1e-12)), 0.0)
        return scores

    def _lr_scores(self, lr: NDArray[np.float64]) -> NDArray[np.float64]:
        before = np.concatenate([[self._lr], lr[:-1]])
        self._lr = float(lr[-1]) if lr.size else self._lr
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = lr / (self._lr_ratio * before)
        return np.where((before > 0) & np.isfinite(lr) & np.isfinite(scores), scores, 0.0)

    def _norm_score(self, norm: float) -> float:
        score = 0.0
        if len(self._norms) >= 5 and norm > self._norm_ratio * min(self._norms):
            usual = median(self._norms)
            score = norm / (self._norm_ratio * usual) if usual > 0 else 0.0
        self._norms.append(norm)
        return score

    def to_dict(self) -> dict[str, Any]:
        """Return the kept notes in the order of their updates, and the second moment before the first, as JSON values."""
        return {
            "updates": [_told(note) for _, _, note in sorted(self._kept, key=lambda k: k[1])],
            "second_moment": self._moment,
        }


def _medians(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each row of `WINDOW` values, in a fifth of the time that `np.median` takes within a loop."""
    ordered = np.sort(rows, axis=1)
    middle: NDArray[np.float64] = (ordered[:, (WINDOW - 1) // 2] + ordered[:, WINDOW // 2]) / 2
    return middle


def _told(note: Mapping[str, Any]) -> dict[str, Any]:
    fed, parts = note["batch"], note["parts"]
    examples = None if parts is None else [index for part in parts for index in part]
    digest = None if fed is None or fed[1] is None else float(fed[1])
    batch = None if examples is not None or fed is None else {"shape": fed[0], "sum": digest}
    plain = None if examples is None else [i if isinstance(i, (int, str)) else str(i) for i in examples]
    return {
        "update": note["update"], "examples": None if plain is None else plain[:MAX_EXAMPLES],
        "size": None if plain is None else len(plain), "batch": batch,
    }  # fmt: skip
