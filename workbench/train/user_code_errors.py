"""What a person's own code raises, told with the workload's name, the place and what to do about it."""

from __future__ import annotations

import re
from types import TracebackType

from workbench.errors import TargetError, WorkbenchError, WorkloadError, callers_line, in_one_line
from workbench.train.forward import DIFFERENTIATES
from workbench.workloads.base import Workload

__all__ = ["explained"]

_ADVICE = {
    "Expected more than 1 value per channel": (
        "BatchNorm needs at least 2 examples in every batch: take a larger batch_size (batch_size / accumulate_steps is "
        "what it sees), or a norm that does not look at the batch, such as nn.GroupNorm."
    ),
    DIFFERENTIATES: (
        "The loss does not depend on any trained parameter: look for .detach(), .item(), torch.no_grad() or an argmax "
        "between the model and the loss."
    ),
    "out of memory": "Take a smaller batch_size, or the same one in pieces with accumulate_steps=2, 4, ...",
    "must be the same dtype": "Set precision='float32' or 'float64', which casts model and batches alike.",
}
_USUAL = "Check what the model takes and what the loss compares."


class explained:
    """Turn what is raised inside the block into a `WorkloadError`; an error of this package gets the place in front.

    Args:
        workload: whose code runs inside the block.
        where: for example "at step 3" or "in the batch of the train split that begins with example 64".
    """

    __slots__ = ("_name", "_where")

    def __init__(self, workload: Workload, where: str) -> None:
        self._name, self._where = workload.name, where

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Explain an error that left the block; interrupts and errors that are explained already pass."""
        if not isinstance(error, Exception):
            return
        known = f"workload {self._name!r}"
        if isinstance(error, WorkloadError):
            if str(error).startswith(known):
                return
            raise type(error)(f"{known}, {self._where}: {error}") from error
        if isinstance(error, WorkbenchError):
            return
        advice = next((advice for part, advice in _ADVICE.items() if part in str(error)), _USUAL)
        if DIFFERENTIATES in str(error) and callers_line(error):
            advice = "Let what autograd.grad differentiates by require a gradient: x.requires_grad_() before x is used."
        sort = TargetError if re.match(r"Target -?\d+ is out of bounds", str(error)) else WorkloadError
        raise sort(f"{known}, {self._where}: forward or loss raised {in_one_line(error)}. {advice}") from error
