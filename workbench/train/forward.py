"""One forward pass, shapes checked; errors of a person's own code in it, explained with their place; and observers of every call in it."""

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from workbench.errors import TargetError, WorkbenchError, WorkloadError, callers_line, in_one_line
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_loss_shape

MicroBatches = Sequence[tuple[Any, int]]  # the micro-batches of one update, each with its number of examples

T = TypeVar("T")
DIFFERENTIATES = "does not require grad"  # what torch says of a gradient that is asked for where none is kept


OnCall = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""(function, its arguments, those by name) -> what the call returns; who only observes returns `function(*args, **kwargs)`."""

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class DispatchObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operation on tensors inside its block, below autograd and vmap, to `on_call`, which makes the call."""

    def __init__(self, on_call: OnCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_call = on_call

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler at the first operation

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        """Hand the operation on."""
        return self._on_call(func, args, kwargs or {})


class FunctionObserver(TorchFunctionMode):
    """Hands every call of a torch function inside its block, as it is written there, to `on_call`, which makes the call."""

    def __init__(self, on_call: OnCall) -> None:
        super().__init__()
        self._on_call = on_call

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        """Hand the call on."""
        return self._on_call(func, args, kwargs or {})


class NotFinite(WorkloadError):
    """The loss, or a metric, raised on outputs that are not finite."""


def all_finite(values: Any) -> bool:
    """Tell whether every tensor in nested values is finite; it waits for the device."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_sparse]
    return all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point() or t.is_complex())


def has_diverged(error: Exception, model: nn.Module) -> bool:
    """Tell whether what was raised is owed to numbers that are not finite: outputs, weights or running statistics."""
    if isinstance(error, NotFinite):
        return True
    return not isinstance(error, WorkbenchError) and not all_finite([*model.parameters(), *model.buffers()])


def autocast(device: torch.device, precision: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context of the forward pass: autocast to bfloat16 or float16 where asked for."""
    if precision in ("bfloat16", "float16"):
        return torch.autocast(device.type, dtype=torch.float16 if precision == "float16" else torch.bfloat16)
    return contextlib.nullcontext()


@contextlib.contextmanager
def buffers_put_back(model: nn.Module) -> Iterator[None]:
    """Put every buffer back: the same tensor in its place, with the values that it had."""
    held = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    before = [(*each, each[2].detach().clone()) for each in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in before:
                module._buffers[name] = buffer
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


def graph_if_needed(compute: Callable[[], T]) -> T:
    """Return what `compute` returns; where gradients are off, detached, and with a graph only if it differentiates itself."""
    if torch.is_grad_enabled():
        return compute()
    try:
        return compute()
    except RuntimeError as error:
        if DIFFERENTIATES not in str(error):
            raise
    with torch.enable_grad():
        return cast(T, tree_map_only(Tensor, Tensor.detach, compute()))


def per_example(workload: Workload, model: nn.Module, batch: Any, examples: int) -> tuple[Any, Tensor, Tensor | None]:
    """Return (outputs, losses, weights (examples,) or None) of one batch, shapes checked.

    Losses have shape (examples,), or () where the person's loss is one value a batch already, as `model(**batch).loss` is.
    """
    return graph_if_needed(lambda: _per_example(workload, model, batch, examples))


def _per_example(workload: Workload, model: nn.Module, batch: Any, examples: int) -> tuple[Any, Tensor, Tensor | None]:
    outputs = workload.forward(model, batch)
    try:
        losses = workload.loss(outputs, batch)
    except WorkbenchError:
        raise
    except Exception as error:
        if (
            isinstance(error, TypeError)
            and isinstance(outputs, Tensor)
            and "'Tensor' object is not callable" in str(error)
        ):
            raise WorkloadError(
                "the loss calls its first argument as if it were the model, but loss(outputs, batch) is given the outputs, here a "
                f"tensor {tuple(outputs.shape)}. Call the model in forward=lambda model, batch: ..., and compare its outputs with the batch in loss."
            ) from error
        if all_finite(outputs):
            raise
        raise NotFinite(f"the loss raised {in_one_line(error)}, on outputs that are not finite.") from error
    check_loss_shape(losses, examples, per_batch=workload.weights is None)
    weights = None if workload.weights is None else workload.weights(batch)
    if weights is not None:
        check_loss_shape(weights, examples, what="weights(batch)")
    return outputs, losses, weights


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
    "not implemented for 'Half'": "This device has no float16 for that operation: take precision='bfloat16'.",
    "must be the same dtype": "Set precision='float32' or 'float64', which casts model and batches alike.",
}
_USUAL = "Check what the model takes and what the loss compares."


@contextlib.contextmanager
def explained(workload: Workload, where: str) -> Iterator[None]:
    """Turn what is raised inside the block into a `WorkloadError`; an error of this package gets the place in front, once."""
    known = f"workload {workload.name!r}"
    try:
        yield
    except WorkloadError as error:
        if str(error).startswith(known):
            raise
        raise type(error)(f"{known}, {where}: {error}") from error
    except WorkbenchError:
        raise
    except Exception as error:
        advice = next((advice for part, advice in _ADVICE.items() if part in str(error)), _USUAL)
        if sizes := re.search(r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", str(error)):
            advice = "A layer takes {1} features and is given {0}: the last size of its input.".format(*sizes.groups())
        if DIFFERENTIATES in str(error) and callers_line(error):
            advice = "Let what autograd.grad differentiates by require a gradient: x.requires_grad_() before x is used."
        sort = TargetError if re.match(r"Target -?\d+ is out of bounds", str(error)) else WorkloadError
        raise sort(f"{known}, {where}: forward or loss raised {in_one_line(error)}. {advice}") from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that memory ran out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes that tensors made by `function` take at a time, on top of those that are there before.

    On CUDA the allocator counts; elsewhere the storages of all results do, so what an operation needs inside itself is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    live = _LiveStorages()
    with DispatchObserver(live.meet):
        function()
    return int(live.peak)


class _LiveStorages:
    """Adds up the storages that operations make, for as long as each of them lives."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call, and count what it made; what was there before does not count."""
        self._meet((args, kwargs), new=False)
        result = func(*args, **kwargs)
        self._meet(result, new=True)
        self.peak = max(self.peak, self.live)
        return result

    def _meet(self, values: Any, *, new: bool) -> None:
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)):
            key = storage._cdata
            if key not in self._known:
                size = storage.nbytes() if new else 0
                self.live += size
                self._known[key] = weakref.ref(storage, partial(self._forget, key, size))

    def _forget(self, key: int, size: int, _: Any) -> None:
        self.live -= size
        del self._known[key]
