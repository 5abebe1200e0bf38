"""Which way to the gradients a stack of lanes takes: measured on this model, batch, device and number of lanes."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.train.cannot_batch import CannotBatch
from workbench.train.data_stream import DataStream
from workbench.train.evaluation import Evaluation
from workbench.train.gradients import Gradients, LaneLoss, LoopGradients, MicroBatches
from workbench.train.lanes import LaneStack
from workbench.train.rng import isolated_rng
from workbench.train.vmap_gradients import VmapGradients, verify
from workbench.workloads.base import Workload

__all__ = ["Arrangement", "Chosen", "arrangements", "choose_gradients"]

WORTH_SECONDS = (
    2.0  # rule of thumb: tracing and measuring take up to a second, which a shorter training does not give back
)
TIMED_SECONDS = 0.1  # rule of thumb: a way is timed for this long, or for one step
ALL = 2**31  # lanes in a call: however many there are
REMEMBERED = 32  # rule of thumb: choices of earlier stacks that are kept

_SHORT = "too short to measure"

Update = Sequence[MicroBatches]


class Arrangement(NamedTuple):
    """How the lanes of a stack go through one traced program.

    Attributes:
        lanes_per_call: lanes in one call of the program.
        threads: calls at a time, each on one core; with 1 the single call has all cores.
    """

    lanes_per_call: int
    threads: int

    def __str__(self) -> str:
        """Return it as words."""
        return f"vmap, {self.lanes_per_call} a call, {self.threads} at a time"


class _Verdict(NamedTuple):
    arrangement: Arrangement | None
    reason: str
    measured_ms: dict[str, float]


_known: OrderedDict[Hashable, tuple[Workload, _Verdict]] = OrderedDict()


class Chosen:
    """A way to the gradients, and why it was taken; where a traced program fails later on, plain autograd takes over.

    Attributes:
        gradients: the way taken now.
        arrangement: of its calls; None is plain autograd.
        fell_back: whether it is another one than in the beginning.
    """

    def __init__(self, loop: LoopGradients, verdict: _Verdict, gradients: Gradients | None = None) -> None:
        self._loop = loop
        self.gradients: Gradients = gradients or loop
        self.arrangement = None if gradients is None else verdict.arrangement
        self._why: dict[str, Any] = {"reason": verdict.reason}
        if verdict.measured_ms:
            self._why["measured_ms"] = verdict.measured_ms
        self.fell_back = False

    @property
    def lane(self) -> int | None:
        """The lane in progress, where lanes are taken one after the other."""
        return self._loop.lane if self.gradients is self._loop else None

    def __call__(self, batches: Update) -> LaneLoss:
        """Return the losses of one update; the gradients are left in the stack."""
        try:
            return self.gradients(batches)
        except CannotBatch as error:
            self.gradients.close()
            self.gradients, self.arrangement, self.fell_back = self._loop, None, True
            self._why = {"reason": str(error)}
            return self._loop(batches)

    def evaluate(self, split: str, batch_size: int, *, rows: Sequence[int]) -> list[list[Evaluation]]:
        """Return the evaluations of the lanes in `rows`."""
        return self.gradients.evaluate(split, batch_size, rows=rows)

    def describe(self) -> dict[str, Any]:
        """Return how it is done, and why, as JSON values."""
        return self.gradients.describe() | self._why

    def close(self) -> None:
        """Let go of threads and settings."""
        self.gradients.close()


def choose_gradients(
    workload: Workload,
    configs: Sequence[TrainConfig],
    stack: LaneStack,
    streams: Sequence[DataStream],
    *,
    wanted: str,
    steps: int,
    watched: str | None,
) -> Chosen:
    """Return the way to the gradients for a stack that is about to train; the stack is left as it was.

    Args:
        workload: what is trained.
        configs: of the lanes.
        stack: the lanes.
        streams: where batches to measure on are taken from, without being used up.
        wanted: "loop", "vmap", or "auto": the faster of the two where measuring pays, plain autograd where it does not.
        steps: that are left to train.
        watched: name of a hook that watches the forward pass of the modules, which a traced program does not have.

    Raises:
        ConfigError: wanted is "vmap", and this model cannot be trained that way; the reason is given.
    """
    loop = LoopGradients(workload, stack)
    if wanted == "loop":
        return Chosen(loop, _Verdict(None, "asked for", {}))
    if watched is not None:
        verdict = _Verdict(None, f"the hook {watched} watches the forward pass", {})
    elif wanted == "auto" and len(stack) == 1:
        verdict = _Verdict(None, "a single lane", {})
    else:
        key = _key(workload, stack, configs[0], wanted)
        known = _known.get(key)
        if known is None or known[1].reason.startswith(_SHORT):
            updates = [[stream.peek(2)[i] for stream in streams] for i in range(2)]
            verdict = _measured(workload, configs, stack, updates, wanted=wanted, steps=steps)
            _remember(key, workload, verdict, lanes=len(stack))
        else:
            verdict = known[1]
            if verdict.arrangement is not None:
                try:
                    _vmap(workload, stack, verdict.arrangement).close()
                except CannotBatch as error:  # these lanes are not as alike as those that were measured
                    verdict = _Verdict(None, str(error), {})
    if verdict.arrangement is None:
        if wanted == "vmap":
            raise ConfigError(
                f"gradients='vmap' cannot train {workload.name!r}: {verdict.reason}. Use gradients='auto', which then trains "
                "one lane after the other by plain autograd, or gradients='loop'."
            )
        return Chosen(loop, verdict)
    return Chosen(loop, verdict, _vmap(workload, stack, verdict.arrangement))


def arrangements(lanes: int, device: torch.device, threads: int) -> list[Arrangement]:
    """Return what is worth trying: all lanes in one call, and on a CPU calls of fewer lanes spread over the cores."""
    found = [Arrangement(lanes, 1)]
    if device.type == "cpu" and threads > 1 and lanes > 1:
        found += [Arrangement(per_call, threads) for per_call in sorted({1, math.ceil(lanes / threads)})]
    return found


def _measured(
    workload: Workload,
    configs: Sequence[TrainConfig],
    stack: LaneStack,
    updates: Sequence[Update],
    *,
    wanted: str,
    steps: int,
) -> _Verdict:
    """Time plain autograd and each arrangement on the first batches."""
    lane_ms = _loop_ms(workload, configs[0], stack, updates)
    measured = {"loop": lane_ms * len(stack)}
    left_s = measured["loop"] * steps / 1e3
    if wanted == "auto" and left_s < WORTH_SECONDS:
        return _Verdict(None, f"{_SHORT}: about {left_s:.1f} s one after the other", {})
    best: Arrangement | None = None
    reason = ""
    tried = arrangements(len(stack), stack.device, torch.get_num_threads())
    with stack.untouched():
        for arrangement in tried[:1] if left_s < WORTH_SECONDS else tried:
            try:
                ms = _vmap_ms(workload, stack, arrangement, updates)
            except CannotBatch as error:
                reason = reason or str(error)
                continue
            if ms < min((v for k, v in measured.items() if wanted == "auto" or k != "loop"), default=math.inf):
                best = arrangement
            measured[str(arrangement)] = ms
    if len(measured) == 1:
        return _Verdict(None, reason, {})
    rounded = {name: float(f"{ms:.3g}") for name, ms in measured.items()}
    return _Verdict(best, "the fastest here" if wanted == "auto" else "asked for", rounded)


def _vmap_ms(workload: Workload, stack: LaneStack, arrangement: Arrangement, updates: Sequence[Update]) -> float:
    way = _vmap(workload, stack, arrangement)
    try:
        verify(stack, LoopGradients(workload, stack), way, updates)
        return _ms(way, updates, stack.device)
    finally:
        way.close()


def _vmap(workload: Workload, stack: LaneStack, arrangement: Arrangement) -> VmapGradients:
    lanes_per_call = min(len(stack), arrangement.lanes_per_call)
    return VmapGradients(workload, stack, lanes_per_call=lanes_per_call, threads=arrangement.threads)


def _loop_ms(workload: Workload, config: TrainConfig, stack: LaneStack, updates: Sequence[Update]) -> float:
    """Time plain autograd on a lane that is not of the stack, so that no module of the stack notices."""
    with isolated_rng():
        alone = LaneStack(workload, [config], stack.device)
        alone.models[0].train()
        return _ms(LoopGradients(workload, alone), updates, stack.device)


def _ms(way: Gradients, updates: Sequence[Update], device: torch.device) -> float:
    """Return the milliseconds of one step, the shortest of those that fit into `TIMED_SECONDS`."""
    way(updates[0])
    _wait(device)
    began, best = time.perf_counter(), math.inf
    while True:
        start = time.perf_counter()
        way(updates[1])
        _wait(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now - began > TIMED_SECONDS:
            return best * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _key(workload: Workload, stack: LaneStack, config: TrainConfig, wanted: str) -> Hashable:
    lanes = 2 ** math.ceil(math.log2(len(stack)))
    batches = (config.batch_size, config.accumulate_steps, config.precision, len(set(stack.streams)))
    return (
        id(workload),
        tuple(stack.shapes),
        stack.values.dtype,
        str(stack.device),
        lanes,
        batches,
        torch.get_num_threads(),
        wanted,
    )


def _remember(key: Hashable, workload: Workload, verdict: _Verdict, *, lanes: int) -> None:
    if verdict.arrangement is not None and verdict.arrangement.lanes_per_call == lanes:
        verdict = verdict._replace(arrangement=verdict.arrangement._replace(lanes_per_call=ALL))
    _known[key] = (workload, verdict)  # the workload is held, so that its id stays its own
    while len(_known) > REMEMBERED:
        _known.popitem(last=False)
