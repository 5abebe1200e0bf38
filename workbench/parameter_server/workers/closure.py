"""`Closure` and `RemoteValue`: a function on its way to some worker, and what will come back; how values travel through Ray."""

import contextlib
import logging
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from workbench.errors import UsageError
from workbench.parameter_server.errors import CancelledError

NO_OPTIMIZER = (
    "a torch optimizer: each worker would train a copy of its own, and nothing would come back. Place the module by "
    "strategy.place(module, TrainConfig(...)), give what that returns as an argument, and call backward() inside of "
    "`with placed.step() as module`: the servers make the update."
)

Value = TypeVar("Value")


class RemoteValue(Generic[Value]):
    """The result of a scheduled function: not there yet, a value, or an error (T6.1, T6.7).

    The value was copied to the coordinator when the function ended, so that it stays fetchable when its worker dies (T11.1).
    """

    def __init__(self) -> None:
        self._future: Future[Value] = Future()

    def fetch(self, timeout_s: float | None = None) -> Value:
        """Wait for the function's result, or so long, and return it, tensors in the coordinator's memory.

        Raises:
            CancelledError: the function was cancelled before its end (T12.2).
            TimeoutError: it did not end in time.
            Exception: what the function itself raised.
        """
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():  # the function's own error, or it has just ended
                return self._future.result()
            raise TimeoutError(
                f"The function has not ended within {timeout_s:g} s; fetch again, or wait longer."
            ) from None

    def done(self) -> bool:
        """Return whether `fetch` would answer at once."""
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback()` once when `fetch` answers, at once where it does already.

        It is called by the thread that brings the result, in order of completion: it must be quick, and must not schedule or wait. What
        it raises is logged.
        """

        def called(_: object) -> None:
            try:
                callback()
            except BaseException:  # the thread serves a worker, which none other would
                logging.getLogger(__name__).exception("What was to be called with a result raised.")

        self._future.add_done_callback(called)

    def set_value(self, value: Value) -> None:
        """Give the result; the first result or error stays."""
        with contextlib.suppress(InvalidStateError):
            self._future.set_result(value)

    def set_error(self, error: BaseException) -> None:
        """Give the error; the first result or error stays."""
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(error)


@dataclass(eq=False)
class Closure:
    """A function with its arguments, as it waits in the queue; a `PerWorkerValues` stands for what the worker in question has (T7.2)."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: RemoteValue[Any] = field(default_factory=RemoteValue)  # what `schedule` returned
    # the same for all that were put since the last error
    cancel: threading.Event = field(default_factory=threading.Event)
    tag: int | None = None  # the only worker that it is for
    run: int | None = None  # in which place it began; the same when it runs again
    lost: list[int] = field(default_factory=list)  # workers that died while they ran it

    def __post_init__(self) -> None:
        """Refuse what cannot be called, and values that are still on their way (behaviours 19, 20)."""
        if not callable(self.function):
            raise TypeError(
                f"schedule takes a function, not {type(self.function).__name__}: {self.function!r}. Give the function itself and "
                "its arguments beside it: schedule(step, args=(iterator,))."
            )
        for leaf in tree_leaves((list(self.args), dict(self.kwargs))):
            if isinstance(leaf, Optimizer):
                raise UsageError(f"schedule got {type(leaf).__name__}, {NO_OPTIMIZER}")
            if isinstance(leaf, nn.Module) and leaf.training and any(each.requires_grad for each in leaf.parameters()):
                raise UsageError(
                    f"schedule got a module in training mode ({type(leaf).__name__}) as an argument: each worker would train a copy of its "
                    "own. Give what strategy.place(module, TrainConfig(...)) returns; call eval() on a module that only computes."
                )
            if hasattr(leaf, "not_an_argument"):
                raise UsageError(leaf.not_an_argument)
            if isinstance(leaf, RemoteValue):
                raise UsageError(
                    "schedule got a RemoteValue as an argument: the value may not exist yet. Give its fetch() instead, or do "
                    "both steps in one function."
                )

    @property
    def name(self) -> str:
        """What its function is called."""
        return str(getattr(self.function, "__qualname__", repr(self.function)))

    def mark_cancelled(self) -> None:
        """Let `fetch` raise `CancelledError`."""
        self.output.set_error(CancelledError())


def map_structure(function: Callable[[Any], Any], structure: Any) -> Any:
    """Return nested tuples, named tuples, lists and dicts with `function` of each value in its place."""
    return tree_map(function, structure, is_leaf=lambda each: isinstance(each, PackedSequence))


@contextlib.contextmanager
def returning() -> Iterator[None]:
    """Say what to do where what a function returned cannot be sent to the coordinator."""
    try:
        yield
    except Exception as error:
        raise TypeError(
            f"What the function returned cannot be sent to the coordinator: {error}. Return numbers, text, arrays and tensors; what shall stay on "
            "the workers is made there by coordinator.per_worker."
        ) from error


_SIMPLE = (int, float, bool, str, bytes, type(None))


@dataclass(frozen=True)
class Packed:
    """A tensor's bytes, its shape and dtype; NumPy does not know every dtype of torch."""

    content: NDArray[np.uint8]
    shape: tuple[int, ...]
    dtype: torch.dtype


def to_wire(value: Any) -> Any:
    """Return nested tuples, lists and dicts with every dense tensor packed; memory is shared where it can be."""
    return map_structure(_packed, value)


def from_wire(value: Any) -> Any:
    """Undo `to_wire`; the tensors are the caller's own."""
    return map_structure(_unpacked, value)


def to_bytes(value: Any, pack: Callable[[Any], bytes], also: tuple[type, ...] = ()) -> bytes:
    """Return what `pickle.loads` reads; `pack` takes longer, and is for all but numbers, text, packed tensors and types in `also`."""
    return pickle.dumps(value, protocol=5) if _simple(value, (*_SIMPLE, Packed, *also)) else pack(value)


def _simple(value: Any, types: tuple[type, ...]) -> bool:
    if type(value) in (list, tuple):
        return all(_simple(each, types) for each in value)
    if type(value) is dict:
        return all(_simple(each, types) for pair in value.items() for each in pair)
    return type(value) in types


def _packed(leaf: Any) -> Any:
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
        return leaf
    flat = leaf.detach().cpu().contiguous().reshape(-1)
    return Packed(flat.view(torch.uint8).numpy(), tuple(leaf.shape), leaf.dtype)


def _unpacked(leaf: Any) -> Any:
    if not isinstance(leaf, Packed):
        return leaf
    if not leaf.content.size:
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    return torch.from_numpy(leaf.content.copy()).view(leaf.dtype).reshape(leaf.shape)
