"""A person's loader made again with something changed, and batches taken from it under a time limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from workbench.errors import DataError
from workbench.topics.input.timed import TimedCollate, TimedDataset, TimedStream
from workbench.workloads.items import item_error

__all__ = ["batches_of", "closed", "is_stream", "reads_all", "timed_loader", "torch_loader"]


class TimedOut(DataError):
    """No batch came within the time limit."""


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[Callable[[], None]]:
    """Raise `TimedOut` in a block that gives no sign of life for `seconds`; the yielded function is the sign.

    It works by an alarm signal, so in the main thread of a process alone, and not on Windows; elsewhere there is no limit. What
    never returns to Python, inside a library, is interrupted as soon as it does.

    Args:
        seconds: between signs of life.
        what: for the message, such as "The loader gave no batch".
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield lambda: None
        return

    def stop(_: int, frame: FrameType | None) -> None:
        raise TimedOut(
            f"{what} for {seconds:g} s, which is the time limit (timeout_s). It was in {_place(frame)}. Look at what it waits "
            "for, or raise the limit."
        )

    before: Any = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield lambda: (signal.setitimer(signal.ITIMER_REAL, seconds), None)[1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(frame: FrameType | None) -> str:
    """Name the innermost line that is the person's own, or the innermost one."""
    if frame is None:
        return "a place that is not known"
    innermost = frame
    walk: FrameType | None = frame
    while walk is not None:
        module = str(walk.f_globals.get("__name__", ""))
        if not module.startswith(
            ("torch", "workbench.", "threading", "multiprocessing", "queue", "selectors", "signal")
        ):
            innermost = walk
            break
        if module.startswith("torch.utils.data.dataloader"):
            return "its worker processes"
        walk = walk.f_back
    code = innermost.f_code
    return f"{code.co_qualname} ({code.co_filename.rsplit('/', 1)[-1]}:{innermost.f_lineno})"


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
    loader: DataLoader[Any],
    *,
    num_workers: int | None = None,
    persistent_workers: bool | None = None,
    dataset: Any = None,
    collate: Callable[[Any], Any] | None = None,
    endless: bool = False,
) -> DataLoader[Any]:
    """Return a loader like another one, whose batches are `TimedBatch`es; the other one is left alone.

    Args:
        loader: the person's own; its sampler, and with it the order of the examples, is shared.
        num_workers: None is as it has.
        persistent_workers: None is as it has.
        dataset: None is its own.
        collate: None is its own.
        endless: begin the sampler again when it is through, so that workers never stop; not for streams.
    """
    data = loader.dataset if dataset is None else dataset
    workers = loader.num_workers if num_workers is None else num_workers
    keep = loader.persistent_workers if persistent_workers is None else persistent_workers
    timed = TimedCollate(loader.collate_fn if collate is None else collate)
    settings: dict[str, Any] = {
        "collate_fn": timed,
        "num_workers": workers,
        "pin_memory": loader.pin_memory and torch.cuda.is_available(),
        "generator": loader.generator,
        "worker_init_fn": loader.worker_init_fn,
    }
    if workers:
        settings |= {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": keep,
            "multiprocessing_context": loader.multiprocessing_context,
            "in_order": loader.in_order,
        }
    if is_stream(loader):
        settings |= {"batch_size": loader.batch_size}
        settings |= {"drop_last": loader.drop_last} if loader.batch_size is not None else {}
    elif loader.batch_sampler is None:
        settings |= {"batch_size": None, "sampler": _Endless(loader.sampler) if endless else loader.sampler}
    else:
        settings["batch_sampler"] = _Endless(loader.batch_sampler) if endless else loader.batch_sampler
    with _any_number_of_workers():
        return DataLoader(TimedStream(data, timed) if is_stream(loader) else TimedDataset(data), **settings)


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
        while True:
            empty = True
            for drawn in self.sampler:
                empty = False
                yield drawn
            if empty:
                return


@contextlib.contextmanager
def closed(loader: Any) -> Iterator[Any]:
    """Yield a loader whose worker processes are gone at the end of the block, whatever happened in it."""
    try:
        yield loader
    finally:
        _shut(getattr(loader, "_iterator", None))


def batches_of(loader: Any, *, timeout_s: float) -> Iterator[Any]:
    """Yield one epoch of batches.

    Args:
        loader: a `DataLoader`, or whatever can be iterated over.
        timeout_s: that a batch may take; not for the time that the caller takes between batches.

    Raises:
        TimedOut: a batch took longer.
        DataError: an item raised, or a worker process died.
    """
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
        raise DataError(
            f"a worker process of the loader {what} Try num_workers=0, which shows the error itself.{_guard(loader)}"
        ) from error
    finally:
        if not getattr(loader, "persistent_workers", False):
            _shut(batches)


def _guard(loader: Any) -> str:
    """Return what to add where workers import the script that started them."""
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing.get_context()
    if context.get_start_method() == "fork":
        return ""
    return (
        f" Workers are started by {context.get_start_method()!r} here and import the script that starts them: put what "
        'it does under `if __name__ == "__main__":`.'
    )


def _shut(batches: Any) -> None:
    getattr(batches, "_shutdown_workers", lambda: None)()
