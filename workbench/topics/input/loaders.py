"""A person's loader made again so that it times itself, and batches taken from it, epoch after epoch, under a time limit."""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from workbench.errors import DataError
from workbench.workloads.items import CountedStream, IndexedDataset, item_error

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class Spent(NamedTuple):
    """Seconds that were spent, or, as a moment, since some fixed point in the past."""

    wall_s: float  # on the wall clock
    cpu_s: float  # on processors, by all threads of the process
    # that this thread was ready to run and other processes had the processors; 0 where the system does not tell
    queued_s: float
    # times that this thread gave its processor up to wait for something; NaN where the system does not tell
    sleeps: float = math.nan

    @property
    def blocked_s(self) -> float:
        """Seconds that the thread waited for something else than a processor: a disk, a network, a lock, a sleep."""
        return 0.0 if self.sleeps == 0 else self._idle_s

    @property
    def others_s(self) -> float:
        """Seconds that other programs had the processor: in the queue, or taken from a thread that never went to sleep."""
        return self.queued_s + (self._idle_s if self.sleeps == 0 else 0.0)

    @property
    def _idle_s(self) -> float:
        return max(0.0, self.wall_s - self.cpu_s - self.queued_s)

    def since(self, earlier: Spent) -> Spent:
        """Return what passed between two moments of one thread."""
        passed = Spent(*(a - b for a, b in zip(self, earlier, strict=True)))
        return passed._replace(queued_s=max(0.0, passed.queued_s))


def now() -> Spent:
    """Return this moment; it takes about 20 microseconds."""
    told = hasattr(resource, "RUSAGE_THREAD")
    sleeps = float(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw) if told else math.nan
    return Spent(time.perf_counter(), time.process_time(), queued_s(), sleeps)


def queued_s() -> float:
    """Return the seconds that this thread has been ready to run without a processor; 0 where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


class _Fetched(NamedTuple):
    """An item, or all items of a batch, with where it lies in the dataset and when fetching it began."""

    value: Any
    index: Any
    began: Spent


class TimedBatch(NamedTuple):
    """A batch with what it took to make it."""

    data: Any  # what the loader would have given
    indices: Sequence[Any]  # of its examples in a map-style dataset; the places in the stream for an iterable one
    items: Spent  # on fetching the items
    collate: Spent  # on making one batch of them

    def pin_memory(self) -> TimedBatch:
        """Pin what the loader would have pinned."""
        return self._replace(data=torch.utils.data._utils.pin_memory.pin_memory(self.data))  # type: ignore[no-untyped-call]


class _Passing:
    """Attributes of a wrapped dataset, for a `worker_init_fn` that reads or sets some."""

    _own = ("_inner", "_asked", "_collate")

    def __init__(self, data: Any, **own: Any) -> None:
        self.__dict__.update(own, _inner=data)

    def __getattr__(self, name: str) -> Any:
        if name in self._own or name.startswith("__"):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)


class _TimedDataset(_Passing, Dataset[Any]):
    """A map-style dataset that says when fetching a batch began; an item that raises is named."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, _asked=IndexedDataset(data, split=None))

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: Any) -> Any:
        began = now()
        return _Fetched(self._asked[index], [index], began)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        began = now()
        return _Fetched(self._asked.__getitems__(indices), list(indices), began)


class _TimedStream(_Passing, IterableDataset[Any]):
    """The same of an iterable dataset; `collate` says when a batch is done, in the same process."""

    def __init__(self, data: Any, collate: TimedCollate) -> None:
        super().__init__(data, _asked=CountedStream(data, split=None), _collate=collate)

    def __iter__(self) -> Iterator[Any]:
        items, began = iter(self._asked), now()
        for place in itertools.count():
            if self._collate.done:  # the clock costs too much to be asked for every item
                began, self._collate.done = now(), False
            try:
                yield _Fetched(next(items), place, began)
            except StopIteration:
                return


class TimedCollate:
    """A collate function that returns a `TimedBatch`; `done`: a batch was made, and no item of the next one was asked for yet."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate, self.done = collate, True

    def __call__(self, fetched: Any) -> TimedBatch:
        """Collate what a timed dataset gave."""
        if isinstance(fetched, _Fetched):
            values, indices, began = fetched
        else:
            values, indices, began = [f.value for f in fetched], [f.index for f in fetched], fetched[0].began
        middle = now()
        data = self.collate(values)
        end = now()
        self.done = True
        return TimedBatch(data, indices, middle.since(began), end.since(middle))


class TimedOut(DataError):
    """No batch came within the time limit."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise `TimedOut` in a block that takes longer than `seconds`; `what` begins the message, as "The loader gave no batch".

    It works by an alarm signal, so in the main thread of a process alone, and not on Windows; elsewhere there is no limit. What
    never returns to Python, inside a library, is interrupted as soon as it does.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(_: int, frame: FrameType | None) -> None:
        limit = f"{what} for {seconds:g} s, which is the time limit (timeout_s)"
        raise TimedOut(f"{limit}. It was in {_place(frame)}. Look at what it waits for, or raise the limit.")

    before: Any = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(innermost: FrameType | None) -> str:
    """Name the innermost line that is the person's own, or the innermost one."""
    if innermost is None:
        return "a place that is not known"
    walk: FrameType | None = innermost
    libraries = ("torch", "workbench.", "threading", "multiprocessing", "queue", "selectors", "signal")
    while walk is not None and (module := str(walk.f_globals.get("__name__", ""))).startswith(libraries):
        if module.startswith("torch.utils.data.dataloader"):
            return "its worker processes"
        walk = walk.f_back
    frame = walk or innermost
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})"


def torch_loader(loader: Any) -> DataLoader[Any] | None:
    """Return a loader that can be made again with something changed; None for what iterates in a way of its own."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return loader if plain else None


def reads_all(loader: DataLoader[Any]) -> bool:
    """Tell whether an epoch is all of a map-style dataset, by torch's own samplers: theirs go by its length."""
    sampler, batches = loader.sampler, loader.batch_sampler
    whole: Any = sampler.data_source if isinstance(sampler, (SequentialSampler, RandomSampler)) else None
    return not is_stream(loader) and whole is loader.dataset and (batches is None or loader.batch_size is not None)


def is_stream(loader: DataLoader[Any]) -> bool:
    """Tell whether a loader reads an iterable dataset, which has no items by index."""
    return isinstance(loader.dataset, IterableDataset)


def timed_loader(
    loader: DataLoader[Any], *, num_workers: int | None = None, persistent_workers: bool | None = None, dataset: Any = None,
    collate: Callable[[Any], Any] | None = None, endless: bool = False,
) -> DataLoader[Any]:  # fmt: skip
    """Return a loader like another one, whose batches are `TimedBatch`es; the other one is left alone, its sampler shared."""
    data, stream = loader.dataset if dataset is None else dataset, is_stream(loader)
    timed = TimedCollate(collate or loader.collate_fn)
    workers = loader.num_workers if num_workers is None else num_workers
    settings: dict[str, Any] = {
        "collate_fn": timed, "num_workers": workers, "pin_memory": loader.pin_memory and torch.cuda.is_available(),
        "generator": loader.generator, "worker_init_fn": loader.worker_init_fn,
    }  # fmt: skip
    if workers:
        settings |= {name: getattr(loader, name) for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "in_order")}  # fmt: skip
        if persistent_workers is not None:
            settings["persistent_workers"] = persistent_workers
    if stream:
        settings |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last and loader.batch_size is not None}
    elif loader.batch_sampler is None:
        settings |= {"batch_size": None, "sampler": _Endless(loader.sampler) if endless else loader.sampler}
    else:
        settings["batch_sampler"] = _Endless(loader.batch_sampler) if endless else loader.batch_sampler
    with _any_number_of_workers():
        return DataLoader(_TimedStream(data, timed) if stream else _TimedDataset(data), **settings)


@contextlib.contextmanager
def _any_number_of_workers() -> Iterator[None]:
    """Keep torch from warning that workers are more than processors: whether that is too many is what is measured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


class _Endless:
    """A sampler that is begun again when it is through."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        empty = False
        while not empty:
            empty = True
            for drawn in self.sampler:
                empty = False
                yield drawn


@contextlib.contextmanager
def closed(loader: Any) -> Iterator[Any]:
    """Yield a loader whose worker processes are gone at the end of the block, whatever happened in it."""
    try:
        yield loader
    finally:
        _shut(getattr(loader, "_iterator", None))


def _shut(batches: Any) -> None:
    getattr(batches, "_shutdown_workers", lambda: None)()


def batches_of(loader: Any, *, timeout_s: float) -> Generator[Any, None, None]:
    """Yield one epoch of batches of a `DataLoader`, or whatever can be iterated over; each may take `timeout_s`."""
    batches: Any = None
    try:
        while True:
            with time_limit(timeout_s, "The loader gave no batch"):
                if batches is None:
                    with _any_number_of_workers():
                        batches = iter(loader)
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch
    except TimedOut:
        for worker in getattr(batches if batches is not None else loader, "_workers", ()):
            worker.terminate()  # or each of them would be waited for
        raise
    except DataError as error:
        raise item_error(error) from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        lines = str(error).splitlines()
        what = f"raised: {lines[-1]}." if lines[0].startswith("Caught") else f"ended: {lines[0].rstrip('.')}."
        method = (getattr(loader, "multiprocessing_context", None) or multiprocessing.get_context()).get_start_method()
        guard = "" if method == "fork" else f" Workers are started by {method!r} here and import the script that starts them: put what it does under `if __name__ == \"__main__\":`."  # fmt: skip
        raise DataError(
            f"a worker process of the loader {what} Try num_workers=0, which shows the error itself.{guard}"
        ) from error
    finally:
        if not getattr(loader, "persistent_workers", False):
            _shut(batches)
