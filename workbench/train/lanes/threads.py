"""How many threads torch computes a step with: one, unless several are faster on this machine as busy as it is now."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from workbench.config import TrainConfig
from workbench.record.folder import read_json
from workbench.record.write import StudyWriter
from workbench.train.batches import train_batches
from workbench.train.forward import DispatchObserver, autocast, per_example
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload

MARGIN = 1.25  # by which several threads have to be faster: they keep other programs from the processor (rule of thumb)
ROUNDS, SECONDS = 5, 1.0
"""Steps that are timed with each number, and the time from which on there are no more (rules of thumb)."""
FACT = "threads"


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def step_threads(
    workload: Workload,
    config: TrainConfig,
    device: torch.device,
    asked: int | None,
    *,
    study: StudyWriter | None,
    split: int = 32768,
) -> Iterator[None]:
    """Let torch compute with so many threads within the block; None decides between one and as many as it has.

    One where no operation is large enough for torch to split it, else what a few steps take less time with: threads wait for each
    other at every operation, and on a busy machine for the turn of each, where 200 steps took 50 s instead of 2.

    Args:
        study: keeps what was found, so that it goes on with the same number; None measures nothing and leaves several.
        split: elements that a tensor has for torch to compute it with several threads (its `GRAIN_SIZE`).
    """
    before = torch.get_num_threads()
    threads, mine = asked or before, cores()
    # Torch begins with a thread a processor, or a core (of two processors), where it has MKL; another number was chosen by somebody.
    own = before in (mine, mine // 2) and not any(map(os.environ.get, ("OMP_NUM_THREADS", "MKL_NUM_THREADS")))
    if asked is None and before > 1 and own and device.type == "cpu":
        known = None if study is None else read_json(study.path / "study.json")["facts"].get(FACT)
        threads = known or _decide(workload, config, device, before, split, measure=study is not None)
        if study is not None and known is None:
            study.add_facts(**{FACT: threads})
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _decide(workload: Workload, config: TrainConfig, device: torch.device, most: int, split: int, *, measure: bool) -> int:  # fmt: skip
    largest = 0

    def note(function: Any, args: Any, kwargs: Any) -> Any:
        nonlocal largest
        made = function(*args, **kwargs)
        largest = max([largest, *(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))])
        return made

    with contextlib.suppress(Exception), isolated_rng():  # who trains says what is wrong
        model = build_model(workload, config, device)
        batch, examples = next(train_batches(workload, config, device))[0]
        largest = max(p.numel() for p in model.parameters())

        def step() -> None:
            with autocast(device, config.precision):
                losses = per_example(workload, model, batch, examples)[1]
            if losses.requires_grad:
                losses.sum().backward()  # type: ignore[no-untyped-call]

        with DispatchObserver(note):
            step()
        if largest < split:
            return 1
        if measure:
            return most if _faster(step, most) else 1
    return most


def _faster(step: Callable[[], None], most: int) -> bool:
    taken: dict[int, list[float]] = {1: [], most: []}
    began = time.perf_counter()
    while len(taken[most]) < ROUNDS and (not taken[most] or time.perf_counter() - began < SECONDS):
        for threads, times in taken.items():
            torch.set_num_threads(threads)
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return statistics.median(taken[1]) > MARGIN * statistics.median(taken[most])
