"""What the model says of a few fixed examples at every evaluation: rows of `predictions/` (P2.12).

The evaluation computes the outputs anyway; only the tracked rows of them are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.errors import ConfigError, UsageError
from workbench.workloads.base import Workload
from workbench.workloads.subsets import example_ids

SPLIT = "validation"


class TrackedExamples:
    """The tracked rows of one evaluation of several lanes: their places in the order of evaluation, ascending, and their ids."""

    def __init__(self, places: Sequence[int], ids: Sequence[int]) -> None:
        self.places, self.ids = list(places), list(ids)
        self._found: dict[int, list[tuple[Tensor | None, Tensor]]] = {}
        self._labels: list[Tensor | None] = []

    def begin(self) -> None:
        """Forget the evaluation before."""
        self._found.clear()
        self._labels.clear()

    def alone(self) -> TrackedExamples:
        """Return these examples for an evaluation that reads nothing else; what it finds is found here."""
        same = TrackedExamples(range(len(self.places)), self.ids)
        same._found, same._labels = self._found, self._labels
        return same

    def rows(self, first: int, examples: int) -> list[int]:
        """Return the tracked rows of the batch that begins with example `first`."""
        return [place - first for place in self.places if first <= place < first + examples]

    def add_labels(self, labels: Tensor | None, rows: Sequence[int]) -> None:
        """Keep the labels of one batch, shape (examples, ...), where they are known."""
        self._labels.append(None if labels is None else labels[rows])

    def add(self, lane: int, prediction: Tensor | None, losses: Tensor) -> None:
        """Keep what one model says of the tracked rows of one batch: shape (rows, ...), and their losses, shape (rows,)."""
        self._found.setdefault(lane, []).append((prediction, losses))

    def columns(self, trials: Sequence[int], step: int) -> dict[str, Any]:
        """Return the table's rows, lane by lane: trial, step, split, example, prediction, label, loss."""
        count = len(self.ids)
        found = [self._found[lane] for lane in range(len(trials))]
        label = _column(self._labels, count)
        return {
            "trial": np.repeat(np.asarray(trials, np.int32), count),
            "step": np.full(count * len(trials), step, dtype=np.int64),
            "split": np.full(count * len(trials), SPLIT),
            "example": np.tile(np.asarray(self.ids, np.int64), len(trials)),
            "prediction": np.concatenate([_column([p for p, _ in parts], count) for parts in found]),
            "label": np.concatenate([label] * len(trials)),
            "loss": np.concatenate([_column([loss for _, loss in parts], count) for parts in found]),
        }


def tracked_examples(workload: Workload, track: int | Sequence[int]) -> TrackedExamples | None:
    """Return the examples of the validation split to track; None where there are none.

    Args:
        workload: what is evaluated; of a named subset the ids are those of the whole split.
        track: so many, evenly spaced over what is evaluated (fewer where there are fewer), or their ids.

    Raises:
        UsageError: an id that is not evaluated.
    """
    check_track(track)
    known = example_ids(workload.validation_data)
    if isinstance(track, int):
        count = min(track, len(known))
        places = [i * len(known) // count for i in range(count)]
    else:
        place_of = {known_id: place for place, known_id in enumerate(known)}
        missing = [wanted for wanted in track if wanted not in place_of]
        if missing:
            more = f" and {len(known) - 8} more" if len(known) > 8 else ""
            part = f"part of a larger split, with ids {', '.join(map(str, known[:8]))}{more}"
            shown = f"with ids 0 to {len(known) - 1}" if isinstance(known, range) else part
            raise UsageError(
                f"track holds example {missing[0]}, which is not evaluated: the validation split of {workload.name!r} has "
                f"{len(known)} example{'' if len(known) == 1 else 's'}, {shown}. Take ids from there, or a number of examples."
            )
        places = sorted({place_of[wanted] for wanted in track})
    return TrackedExamples(places, [known[place] for place in places]) if places else None


def check_track(track: object) -> None:
    """Raise `ConfigError` unless `track` is a number of examples or a sequence of their ids."""
    numbers = [track] if isinstance(track, int) else list(track) if isinstance(track, Sequence) else [None]
    if isinstance(track, str) or any(
        isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in numbers
    ):
        raise ConfigError(
            f"track={track!r} must be a number of examples of the validation split, or a list of their ids, from 0; 0 tracks none."
        )


def _column(parts: Sequence[Tensor | None], count: int) -> NDArray[Any]:
    """Return one value an example: a number, or a flat list of them; NaN where nothing is known."""
    tensors = [part for part in parts if part is not None]
    if not tensors or len(tensors) < len(parts):
        return np.full(count, np.nan)
    real = [torch.view_as_real(t) if t.is_complex() else t for t in (t.detach().cpu() for t in tensors)]
    kind = torch.double if any(t.is_floating_point() for t in real) else torch.long
    if all(t.dim() == 1 for t in real):
        return torch.cat([t.to(kind) for t in real]).numpy()
    column = np.empty(count, dtype=object)  # batches may be padded to lengths of their own
    column[:] = [row for t in real for row in t.to(kind).flatten(1).numpy()]
    return column
