"""What a step reads of a batch (P1.8), and where it fetches numbers from the device, which waits for all work before it (P1.6)."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from workbench.topics.input.timed_loop import Step
from workbench.train.forward import FunctionObserver
from workbench.workloads.items import fresh_containers, leaf_bytes, leaves

_MOVES = frozenset((
    "to", "cpu", "cuda", "xpu", "pin_memory", "contiguous", "detach", "clone", "float", "double", "half", "bfloat16", "long", "int", "type",
    "requires_grad_",
))  # fmt: skip
"""Functions after which a tensor is still the same data, somewhere else or in another type: no use of it yet."""
_LOOKS = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "data_ptr", "is_contiguous", "is_floating_point",
    "is_pinned", "get_device", "__len__", "__repr__", "__hash__", "__get__", "__format__",
))  # fmt: skip
_FETCHES = frozenset((
    "item", "tolist", "numpy", "cpu", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__", "__format__", "__repr__",
))  # fmt: skip


def observe_reads(
    batch: Any, step: Callable[[Any], Any], *, prepare: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Call a step with a batch and return what it reads of it.

    A tensor is read when it enters any computation; moving it to a device or changing its type is none. What is no tensor is
    read when it is taken out of its dict or list. `prepare` is done to the batch first, such as moving it; it reads nothing.

    Returns:
        "read" and "unread" (paths), "bytes" (path -> bytes of the batch), "moved_bytes", "read_bytes", "known" (something was
        seen to be read: a compiled or scripted model may hide all of it).
    """
    prepared = batch if prepare is None else prepare(batch)
    recorder = _Recorder(prepared)
    with FunctionObserver(recorder.note):
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


class _Recorder:
    """Notes which of a batch's leaves take part in a computation, by their paths; `batch` is to be given to the step."""

    def __init__(self, batch: Any) -> None:
        self.read: set[str] = set()
        self.moved: set[str] = set()
        self.unclear: set[str] = set()
        self._paths: dict[int, tuple[str, Tensor]] = {}  # the tensor is held, or its id would be given to another one
        self.batch = self._watched(batch, "")

    def note(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note the leaves among the arguments of one torch function."""
        name = getattr(func, "__name__", "")
        given = [self._paths[id(t)][0] for t in _tensors((args, kwargs)) if id(t) in self._paths]
        result = func(*args, **kwargs)
        if given and name not in _MOVES and name not in _LOOKS:
            self.read.update(given)
        elif given:
            if name in _MOVES:
                self.moved.update(given)
            if isinstance(result, Tensor):
                self._watch(result, given[0])
        return result

    def _watch(self, tensor: Tensor, path: str) -> None:
        self._paths[id(tensor)] = path, tensor

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

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:  # with this, `**batch` and dict(batch) ask for each key
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a value, and note it."""
        self._note(key)
        return super().get(key, default)

    def items(self) -> Any:
        """Pass over all values: who only moves them has not read them, so those that are no tensors stay unclear."""
        self._pass_over()
        return super().items()

    def values(self) -> Any:
        """Pass over all values."""
        self._pass_over()
        return super().values()

    def _plain(self, key: Any) -> bool:
        return key in self._at and not isinstance(dict.get(self, key), (Tensor, _WatchedDict))

    def _note(self, key: Any) -> None:
        if self._plain(key):
            self._recorder.read.add(self._at[key])

    def _pass_over(self) -> None:
        self._recorder.unclear.update(path for key, path in self._at.items() if self._plain(key))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def count_syncs(batches: Sequence[Any], step: Step, *, steps: int = 20) -> dict[str, Any]:
    """Return where and how often a step fetches numbers from the device, over enough `steps` to tell every step from every tenth.

    On CUDA `torch.cuda.set_sync_debug_mode` names every synchronisation; elsewhere calls that would be one on an accelerator are
    counted: `.item()`, `float(tensor)`, `.cpu()`, `.tolist()`, `.numpy()` and their like, on anything that is no part of the batch.

    Returns:
        "steps", "share" (of the steps that fetch at least once), "per_step" (fetches), "places" ({"file:line function": fetches
        per step}, most first), "how".
    """
    on_cuda = torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    found = []
    for k in range(steps):
        batch = batches[k % len(batches)]
        found.append((_cuda_syncs if on_cuda else _fetches)(_tensors(batch), partial(step, fresh_containers(batch))))
    total: Counter[str] = sum(found, Counter())
    return {
        "steps": steps,
        "share": sum(bool(places) for places in found) / steps,
        "per_step": total.total() / steps,
        "places": {place: n / steps for place, n in total.most_common(10)},
        "how": "CUDA's sync debug mode" if on_cuda else "calls that fetch a tensor's values",
    }


def _fetches(batch: list[Tensor], step: Callable[[], Any]) -> Counter[str]:
    """Count the calls that fetch values of tensors which are no part of the batch, nor computed from it alone."""
    places: Counter[str] = Counter()
    given = {id(tensor): tensor for tensor in batch}

    def note(func: Any, args: Any, kwargs: Any) -> Any:
        place = None if args and id(args[0]) in given else _fetched_at(func)
        if place is not None:
            places[place] += 1
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            asked = _tensors((args, kwargs))
            if asked and all(id(t) in given for t in asked):  # such as the longest text, which the host knows
                given[id(result)] = result
        return result

    with FunctionObserver(note):
        step()
    return places


def stale_fetches() -> FunctionObserver:
    """Return a context in which a step runs without its synchronisations: each place gets the value that it fetched the first time."""
    kept: dict[tuple[str, str], Any] = {}

    def fetch_once(func: Any, args: Any, kwargs: Any) -> Any:
        place = _fetched_at(func)
        if place is None:
            return func(*args, **kwargs)
        key = place, func.__name__
        if key not in kept:
            kept[key] = func(*args, **kwargs)
        return kept[key]

    return FunctionObserver(fetch_once)


def _fetched_at(func: Any) -> str | None:
    """Return the person's own line that fetches a number; None for another function, or where an optimizer or scaler of torch asks."""
    frame: FrameType | None = sys._getframe(2) if getattr(func, "__name__", "") in _FETCHES else None
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("torch.optim", "torch.amp", "torch.cuda.amp")):
            return None
        if not module.startswith(("torch.", "workbench.topics.input")) and frame.f_code.co_name != "__torch_function__":
            code = frame.f_code
            return f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return None


def _cuda_syncs(_: list[Tensor], step: Callable[[], Any]) -> Counter[str]:
    """Count what CUDA itself reports; a warning each, whose line is the person's own."""
    before: Any = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    places = (f"{w.filename.rsplit('/', 1)[-1]}:{w.lineno}" for w in said if "synchroniz" in str(w.message))
    return Counter(places)
