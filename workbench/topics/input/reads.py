"""Which parts of a batch a step reads: tensors that enter a computation, and other values that are taken out (P1.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from workbench.workloads.items import leaf_bytes, leaves

__all__ = ["observe_reads"]

_MOVES = frozenset(
    [
        "to",
        "cpu",
        "cuda",
        "xpu",
        "pin_memory",
        "contiguous",
        "detach",
        "clone",
        "float",
        "double",
        "half",
        "bfloat16",
        "long",
        "int",
        "type",
        "requires_grad_",
    ]
)
"""Functions after which a tensor is still the same data, somewhere else or in another type: no use of it yet."""
_LOOKS = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "data_ptr",
        "is_contiguous",
        "is_floating_point",
        "is_pinned",
        "get_device",
        "__len__",
        "__repr__",
        "__hash__",
        "__get__",
        "__format__",
    ]
)


def observe_reads(
    batch: Any, step: Callable[[Any], Any], *, prepare: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Call a step with a batch and return what it reads of it.

    A tensor is read when it enters any computation; moving it to a device or changing its type is none. What is no tensor is
    read when it is taken out of its dict or list.

    Args:
        batch: of the loader.
        step: is called once.
        prepare: done to the batch first, such as moving it; it reads nothing.

    Returns:
        "read" and "unread" (paths), "bytes" (path -> bytes of the batch), "moved_bytes", "read_bytes", "known" (something was
        seen to be read: a compiled or scripted model may hide all of it).
    """
    prepared = batch if prepare is None else prepare(batch)
    recorder = _Recorder(prepared)
    with recorder:
        step(recorder.batch)
    sizes = {path: leaf_bytes(leaf) for path, leaf in leaves(batch)}
    read = sorted(recorder.read)
    moved = {path for path, _ in leaves(prepared)} if prepare is not None else recorder.moved | recorder.read
    return {
        "read": read,
        "unread": [path for path in sizes if path not in recorder.read and path not in recorder.unclear],
        "bytes": sizes,
        "moved_bytes": sum(sizes.get(path, 0) for path in moved),
        "read_bytes": sum(sizes.get(path, 0) for path in read),
        "known": bool(read),
    }


class _Recorder(TorchFunctionMode):
    """Notes which of a batch's leaves take part in a computation.

    Attributes:
        batch: to give to the step.
        read: paths that were read.
        moved: paths of tensors that were moved or converted.
        unclear: paths of values that nobody can watch, or that were only passed over.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self.read: set[str] = set()
        self.moved: set[str] = set()
        self.unclear: set[str] = set()
        self._paths: dict[int, str] = {}
        self._held: list[Tensor] = []
        self.batch = self._watched(batch, "")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the leaves among the arguments of one torch function."""
        name = getattr(func, "__name__", "")
        given = [self._paths[id(t)] for t in _tensors((args, kwargs or {})) if id(t) in self._paths]
        result = func(*args, **(kwargs or {}))
        if not given:
            return result
        if name in _MOVES or name in _LOOKS:
            if name in _MOVES:
                self.moved.update(given)
            if isinstance(result, Tensor):
                self._watch(result, given[0])
        else:
            self.read.update(given)
        return result

    def _watch(self, tensor: Tensor, path: str) -> None:
        self._paths[id(tensor)] = path
        self._held.append(tensor)  # or its id would be given to another one

    def _watched(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            self._watch(value, path or "item")
            return value
        below = [at for at, leaf in leaves(value, path) if not isinstance(leaf, Tensor)]
        if type(value) is dict:
            at = {key: f"{path}/{key}" if path else str(key) for key in value}
            return _WatchedDict({key: self._watched(part, at[key]) for key, part in value.items()}, self, at)
        if type(value) in (list, tuple) and not (below and below[0] == (path or "item")):
            parts = [self._watched(part, f"{path}/{i}" if path else str(i)) for i, part in enumerate(value)]
            self.unclear.update(name for name in below if "/" not in name.removeprefix(f"{path}/"))
            return type(value)(parts)
        if below != [path or "item"]:  # a container of somebody's own: its tensors can be watched, the rest cannot
            self.unclear.update(below)
            for name, leaf in leaves(value, path):
                if isinstance(leaf, Tensor):
                    self._watch(leaf, name)
        elif not path:
            self.unclear.add("item")
        return value


class _WatchedDict(dict[Any, Any]):
    """A dict that notes which values are taken out of it."""

    def __init__(self, values: Mapping[Any, Any], recorder: _Recorder, paths: Mapping[Any, str]) -> None:
        super().__init__(values)
        self._recorder, self._at = recorder, paths

    def _note(self, key: Any) -> None:
        if key in self._at and not isinstance(dict.get(self, key), (Tensor, _WatchedDict)):
            self._recorder.read.add(self._at[key])

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:  # with this, `**batch` and dict(batch) ask for each key
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a value, and note it."""
        self._note(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove a value; throwing it away is no reading of it."""
        return super().pop(key, *default)

    def items(self) -> Any:
        """Pass over all values: who only moves them has not read them, so those that are no tensors stay unclear."""
        self._pass_over()
        return super().items()

    def values(self) -> Any:
        """Pass over all values."""
        self._pass_over()
        return super().values()

    def _pass_over(self) -> None:
        for key, path in self._at.items():
            if not isinstance(dict.get(self, key), (Tensor, _WatchedDict)):
                self._recorder.unclear.add(path)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for part in value:
            yield from _tensors(part)
