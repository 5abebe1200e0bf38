"""Which way to the gradients a stack of lanes takes: measured on this model, batch, device and number of lanes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.train.arrangement import Arrangement, Verdict, arrangements
from workbench.train.batches import DataStream
from workbench.train.diverged_errors import Excuse
from workbench.train.evaluation import Evaluation
from workbench.train.gradients import Gradients, LaneLoss, LoopGradients, MicroBatches
from workbench.train.known_backends import recall, remember, stack_kind
from workbench.train.lane_memory import room_for_calls
from workbench.train.lane_stack import LaneStack
from workbench.train.lane_stacks import is_out_of_memory
from workbench.train.predictions import TrackedExamples
from workbench.train.rng import isolated_rng
from workbench.train.traced.cannot_batch import CannotBatch
from workbench.train.traced.vmap_gradients import VmapGradients, verify
from workbench.workloads.base import Workload

__all__ = ["Chosen", "choose_gradients"]

WORTH_SECONDS = (
    1.0  # rule of thumb: tracing and measuring take up to half of it, which a shorter training does not give back
)
MEASURING_FRAC = 0.02  # rule of thumb: a third arrangement, which seldom wins, is not tried once this share is gone
TIMED_SECONDS = 0.1  # rule of thumb: a way is timed for this long, or for one step

Update = Sequence[MicroBatches]
Vmap = Callable[[Arrangement], VmapGradients]


class Chosen:
    """A way to the gradients, and why it was taken; where a traced program fails later on, plain autograd takes over.

    Attributes:
        gradients: the way taken now.
        arrangement: of its calls; None is plain autograd.
        fell_back: whether it is another one than in the beginning.
        evaluated_alone: why lanes are evaluated one after the other by a way that computes them together; None where
            they are not.
    """

    def __init__(self, loop: LoopGradients, verdict: Verdict, gradients: Gradients | None = None) -> None:
        self._loop = loop
        self.gradients: Gradients = gradients or loop
        self.arrangement = None if gradients is None else verdict.arrangement
        self._why: dict[str, Any] = {"reason": verdict.reason}
        if verdict.measured_ms:
            self._why |= {"measured_ms": verdict.measured_ms, "measured_lanes": verdict.lanes}
        self.fell_back = False
        self.evaluated_alone: str | None = None

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

    def evaluate(
        self, split: str, batch_size: int, *, rows: Sequence[int], tracked: TrackedExamples | None = None
    ) -> list[list[Evaluation]]:
        """Return the evaluations of the lanes in `rows`."""
        if self.evaluated_alone is None:
            try:
                return self.gradients.evaluate(split, batch_size, rows=rows, tracked=tracked)
            except CannotBatch as error:
                self.evaluated_alone = str(error)
        return self._loop.evaluate(split, batch_size, rows=rows, tracked=tracked)

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
    memory: int | None = None,
    before: Mapping[str, Any] | None = None,
    share: bool = False,
    excused: Excuse | None = None,
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
        memory: bytes that the stack may take in all; None is a share of what is free now.
        before: what `Chosen.describe` returned when these lanes began, where they go on from checkpoints: the same way
            gives the same digits (P4.2).
        share: batches are this host's share of those of many.
        excused: see `LoopGradients`.

    Raises:
        ConfigError: wanted is "vmap", and this model cannot be trained that way; the reason is given.
    """
    loop = LoopGradients(workload, stack, share=share, excused=excused)
    if not steps:
        return Chosen(loop, Verdict(None, "no step is left", {}))
    vmap = partial(_vmap, workload, stack, room=room_for_calls(stack, bound=memory))
    if wanted == "loop":
        return Chosen(loop, Verdict(None, "asked for", {}))
    if watched is not None:
        verdict = Verdict(None, f"the hook {watched} watches the forward pass", {})
    elif before is not None and wanted in ("auto", before["gradients"]):
        verdict = _checked(loop, stack, vmap, _updates(streams), _as_before(before))
    else:
        key, updates = (id(workload), wanted, *stack_kind(stack, configs[0])), _updates(streams)
        known = recall(key, lanes=len(stack))
        if known is None:
            verdict = _measured(workload, configs[0], stack, vmap, updates, wanted=wanted, steps=steps)
            if verdict.lasting:
                remember(key, workload, verdict, lanes=len(stack))
        else:
            verdict = _checked(loop, stack, vmap, updates, known)
    if verdict.arrangement is None:
        if wanted == "vmap":
            raise ConfigError(
                f"gradients='vmap' cannot train {workload.name!r}: {verdict.reason}. Use gradients='auto', which then trains "
                "one lane after the other by plain autograd, or gradients='loop'."
            )
        return Chosen(loop, verdict)
    way = vmap(verdict.arrangement)
    way.prepare(_updates(streams)[0])  # what the record says of the calls has to be so from the first step on
    return Chosen(loop, verdict, way)


def _measured(
    workload: Workload,
    config: TrainConfig,
    stack: LaneStack,
    vmap: Vmap,
    updates: Sequence[Update],
    *,
    wanted: str,
    steps: int,
) -> Verdict:
    """Time plain autograd and each arrangement on the first batches."""
    enough_ms = 1e3 * WORTH_SECONDS / (steps * len(stack))  # a step that takes less leaves nothing to gain
    try:
        lane_ms = _loop_ms(workload, config, stack, updates, enough_ms if wanted == "auto" else 0.0)
    except Exception as error:  # training itself says at which step, and what to look at
        if wanted != "auto" or is_out_of_memory(error):
            raise
        return Verdict(None, f"a step failed while it was timed ({type(error).__name__})", {}, lasting=False)
    measured = {"loop": lane_ms * len(stack)}
    left_s = measured["loop"] * steps / 1e3
    if wanted == "auto" and left_s < WORTH_SECONDS:
        return Verdict(None, f"too short to measure: about {left_s:.1f} s one after the other", {}, lasting=False)
    reason, began = "", time.perf_counter()
    timed: list[tuple[float, Arrangement]] = []
    tried = arrangements(len(stack), stack.device, torch.get_num_threads())
    with stack.untouched():
        for arrangement in tried[:1] if left_s < WORTH_SECONDS else tried:
            if len(timed) > 1 and time.perf_counter() - began > MEASURING_FRAC * left_s:
                break
            try:
                ms = _vmap_ms(vmap(arrangement), stack, updates)
            except CannotBatch as error:
                reason = reason or str(error)
                continue
            measured[str(arrangement)] = ms
            timed.append((ms, arrangement))
    rounded = {name: float(f"{ms:.3g}") for name, ms in measured.items()}
    why, lasting = ("the fastest here" if wanted == "auto" else "asked for"), left_s >= WORTH_SECONDS
    reason = "" if timed else reason
    for ms, arrangement in sorted(timed):
        if wanted == "auto" and ms >= measured["loop"]:
            break
        verdict = _checked(
            LoopGradients(workload, stack),
            stack,
            vmap,
            updates,
            Verdict(arrangement, why, rounded, len(stack), lasting),
        )
        if verdict.arrangement is not None:
            return verdict
        reason = verdict.reason
    if reason:  # it may belong to these lanes alone
        return Verdict(None, reason, {}, lasting=False)
    return Verdict(None, why, rounded, len(stack), lasting)


def _checked(loop: LoopGradients, stack: LaneStack, vmap: Vmap, updates: Sequence[Update], known: Verdict) -> Verdict:
    """Return a verdict that was found on other lanes, if the traced program is right for these too."""
    if known.arrangement is None:
        return known
    try:
        way = vmap(known.arrangement)
        try:
            verify(stack, loop, way, updates)
        finally:
            way.close()
    except CannotBatch as error:
        return Verdict(None, str(error), {})
    return known


def _as_before(before: Mapping[str, Any]) -> Verdict:
    """Return the way that was taken before an interruption."""
    loop = before["gradients"] == "loop"
    arrangement = None if loop else Arrangement(before["lanes_per_call"], before["threads"])
    return Verdict(arrangement, str(before["reason"]), before.get("measured_ms", {}), before.get("measured_lanes", 0))


def _updates(streams: Sequence[DataStream]) -> list[Update]:
    """Return the batches of the next two steps, without using them up."""
    return [[stream.peek(2)[i] for stream in streams] for i in range(2)]


def _vmap_ms(way: VmapGradients, stack: LaneStack, updates: Sequence[Update]) -> float:
    try:
        return _ms(way, updates, stack.device)
    finally:
        way.close()


def _vmap(workload: Workload, stack: LaneStack, arrangement: Arrangement, *, room: int) -> VmapGradients:
    lanes_per_call = min(len(stack), arrangement.lanes_per_call)
    return VmapGradients(workload, stack, lanes_per_call=lanes_per_call, threads=arrangement.threads, room=room)


def _loop_ms(
    workload: Workload, config: TrainConfig, stack: LaneStack, updates: Sequence[Update], enough_ms: float
) -> float:
    """Time plain autograd on a lane that is not of the stack, so that no module of the stack notices."""
    with isolated_rng():
        alone = LaneStack(workload, [config], stack.device)
        alone.models[0].train()
        return _ms(LoopGradients(workload, alone), updates, stack.device, enough_ms=enough_ms)


def _ms(way: Gradients, updates: Sequence[Update], device: torch.device, *, enough_ms: float = 0.0) -> float:
    """Return the milliseconds of one step, the shortest of those that fit into `TIMED_SECONDS`, or the first below enough."""
    way(updates[0])
    _wait(device)
    began, best = time.perf_counter(), math.inf
    while True:
        start = time.perf_counter()
        way(updates[1])
        _wait(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now - began > TIMED_SECONDS or best * 1e3 < enough_ms:
            return best * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
