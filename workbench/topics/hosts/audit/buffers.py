"""`BufferWatch`: the running statistics of batch norm on this rank, whenever somebody evaluates or saves (P7.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from workbench.topics.hosts.audit.hashing import hash_of
from workbench.topics.hosts.audit.state import State

__all__ = ["BufferWatch"]

CHANNELS = 8
"""Of a layer whose statistics are written down (rule of thumb: ranks differ in all of them)."""
MAX_NUMBERS = 200_000
MAX_ROWS = 20_000
"""That are written down (rule of thumb: a rehearsal is far shorter, and a job that goes on for days costs nothing more)."""


class BufferWatch:
    """Statistics at each evaluation, at each checkpoint, and before each update goes on.

    A rank that neither evaluates nor saves shows what it held at that moment by what it holds when training goes on.

    Args:
        state: of this rank.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._rows: list[dict[str, Any]] = []
        self._boundary = -1
        self._numbers = 0
        state.on_train_call.append(self._on_train_call)
        state.on_evaluation.append(lambda model: self._note(model, "evaluation"))
        state.on_checkpoint.append(self._on_checkpoint)

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values; the end of the run counts as a moment when training goes on."""
        if self._state.models:
            self._note(self._state.models[0], "end")
        return {"buffers": self._rows}

    def _on_train_call(self, model: nn.Module) -> None:
        if self._state.step != self._boundary and len(self._rows) < MAX_ROWS:
            self._boundary = self._state.step
            self._note(model, "training")

    def _on_checkpoint(self) -> None:
        if self._state.models:
            self._note(self._state.models[0], "checkpoint")

    def _note(self, model: nn.Module, moment: str) -> None:
        if model is self._state.models[0]:
            self.note(_layers(model), moment)

    def note(self, layers: Sequence[tuple[Tensor, Tensor]], moment: str) -> None:
        """Write down means and variances of all layers, as they are at a moment."""
        if not layers:
            return
        row: dict[str, Any] = {
            "step": self._state.step,
            "moment": moment,
            "hash": hash_of(t for pair in layers for t in pair),
        }
        if self._numbers < MAX_NUMBERS:
            row["means"] = [_rounded(v) for mean, _ in layers for v in mean[:CHANNELS].double().tolist()]
            row["variances"] = [_rounded(v) for _, var in layers for v in var[:CHANNELS].double().tolist()]
            self._numbers += 2 * len(row["means"])
        self._rows.append(row)


def _rounded(value: float) -> float:
    return float(f"{value:.9g}")


def _layers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    found = []
    for module in model.modules():
        mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
        if isinstance(mean, Tensor) and isinstance(variance, Tensor):
            found.append((mean.detach(), variance.detach()))
    return found
