"""Which gradient backend a stack of lanes takes: measured on this model, batch, device and number of lanes, and remembered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.train.batches import DataStream
from workbench.train.evaluation import Evaluation
from workbench.train.forward import MicroBatches, is_out_of_memory
from workbench.train.gradients import Excuse, LaneLoss, LoopGradients
from workbench.train.lane import room_for_calls
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.vmap_gradients import VmapGradients, verify
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import LaneStack
from workbench.train.steps.own_step import ONE_AT_A_TIME, OwnStep
from workbench.workloads.base import Workload

WORTH_SECONDS = 1.0  # rule of thumb: tracing and measuring take up to half of it, which less training never regains
MEASURING_FRAC = 0.02  # rule of thumb: a third arrangement, which rarely wins, is not tried once this share is gone
TIMED_SECONDS = 0.1  # rule of thumb: a backend is timed for this long, or for one step
ALL = 2**31  # lanes in a call: however many there are
TOO_SHORT = "too short to measure"
REMEMBERED = 1000  # rule of thumb: choices that are kept on this machine

Gradients = LoopGradients | VmapGradients | OwnStep
Update = Sequence[MicroBatches]
Vmap = Callable[["Arrangement"], VmapGradients]


class Arrangement(NamedTuple):
    """How the lanes of a stack go through one traced program: calls of so many lanes, so many at a time, each on one core."""

    lanes_per_call: int
    threads: int

    def __str__(self) -> str:
        """Return it as words."""
        return f"vmap, {self.lanes_per_call} a call, {self.threads} at a time"


class Verdict(NamedTuple):
    """What was decided for a stack."""

    arrangement: Arrangement | None
    reason: str
    measured_ms: Mapping[str, float] = {}
    lanes: int = 0
    lasting: bool = True


def arrangements(lanes: int, device: torch.device, threads: int) -> list[Arrangement]:
    """Return what is worth trying: all lanes in one call, and on a CPU calls of fewer lanes spread over the cores."""
    sizes = sorted({1, math.ceil(lanes / threads)}) if device.type == "cpu" and threads > 1 and lanes > 1 else []
    return [Arrangement(lanes, 1), *(Arrangement(n, threads) for n in sizes)]


class Chosen:
    """The backend taken, and why; where a traced program fails later on, plain autograd takes over."""

    def __init__(self, loop: LoopGradients, verdict: Verdict, gradients: Gradients | None = None) -> None:
        self._loop = loop
        self.gradients: Gradients = gradients or loop
        self._why: dict[str, Any] = {"reason": verdict.reason}
        if verdict.measured_ms:
            self._why |= {"measured_ms": dict(verdict.measured_ms), "measured_lanes": verdict.lanes}
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
            self.gradients, self.fell_back, self._why = self._loop, True, {"reason": str(error)}
            return self._loop(batches)

    def evaluate(self, split: str, batch_size: int, **how: Any) -> list[list[Evaluation]]:
        """Return the evaluations of the lanes in `rows`."""
        if self.evaluated_alone is None:
            try:
                return self.gradients.evaluate(split, batch_size, **how)
            except CannotBatch as error:
                self.evaluated_alone = str(error)
        return self._loop.evaluate(split, batch_size, **how)

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
    own: OwnStep | None = None,
) -> Chosen:
    """Return the gradient backend for a stack that is about to train; the stack is left as it was.

    Args:
        wanted: "loop", "vmap", or "auto": the faster of the two where measuring pays, plain autograd where it does not.
        memory: bytes that the stack may take in all; None is a share of what is free now.
        before: what `Chosen.describe` returned when these lanes began, where they go on from checkpoints: the same backend
            gives the same digits (P4.2).
        share: batches are this process's share of those of many.
        own: a person's own step, which takes the place of all this.
    """
    loop = LoopGradients(workload, stack, share=share, excused=excused)
    if own is not None:
        return Chosen(loop, Verdict(None, ONE_AT_A_TIME), own.under(loop, excused))
    if not steps or wanted == "loop":
        return Chosen(loop, Verdict(None, "asked for" if steps else "no step is left"))
    room = room_for_calls(stack, bound=memory)
    updates: list[Update] = [[stream.peek(2)[i] for stream in streams] for i in range(2)]  # without using them up

    def vmap(arrangement: Arrangement) -> VmapGradients:
        lanes = min(len(stack), arrangement.lanes_per_call)
        return VmapGradients(workload, stack, lanes_per_call=lanes, threads=arrangement.threads, room=room)

    if watched is not None:
        verdict = Verdict(None, f"the hook {watched} watches the forward pass")
    elif before is not None and wanted in ("auto", before["gradients"]):
        calls = None if before["gradients"] == "loop" else Arrangement(before["lanes_per_call"], before["threads"])
        measured = before.get("measured_ms", {}), before.get("measured_lanes", 0)
        verdict = _checked(loop, stack, vmap, updates, Verdict(calls, str(before["reason"]), *measured))
    else:
        kind = _kind(workload, configs[0], stack, wanted)
        known = recall(kind, lanes=len(stack), steps=steps)
        if known is None:
            verdict = _measured(workload, configs[0], stack, vmap, updates, wanted=wanted, steps=steps)
            if verdict.measured_ms or verdict.reason.startswith(TOO_SHORT):  # not a refusal, whose cause may be mended
                remember(kind, verdict, lanes=len(stack), steps=steps)
        else:
            verdict = _checked(loop, stack, vmap, updates, known)
    if verdict.arrangement is None:
        if wanted == "vmap":
            raise ConfigError(
                f"gradients='vmap' cannot train {workload.name!r}: {verdict.reason}. Use gradients='auto', which then trains "
                "one lane after the other by plain autograd, or gradients='loop'."
            )
        return Chosen(loop, verdict)
    gradients = vmap(verdict.arrangement)
    gradients.prepare(updates[0])  # what the record says of the calls has to be so from the first step on
    return Chosen(loop, verdict, gradients)


def _measured(
    workload: Workload, config: TrainConfig, stack: LaneStack, vmap: Vmap, updates: Sequence[Update], *, wanted: str, steps: int
) -> Verdict:  # fmt: skip
    """Time plain autograd and each arrangement on the first batches, and return the fastest that is right."""
    lanes, auto = len(stack), wanted == "auto"
    enough_ms = 1e3 * WORTH_SECONDS / (steps * lanes) if auto else 0.0  # a step that takes less leaves nothing to gain
    try:
        with isolated_rng():  # on a lane that is not of the stack, so that no module of the stack notices
            alone = LaneStack(workload, [config], stack.device)
            alone.models[0].train()
            loop_ms = _ms(LoopGradients(workload, alone), updates, stack.device, enough_ms=enough_ms) * lanes
    except Exception as error:  # training itself says at which step, and what to look at
        if not auto or is_out_of_memory(error):
            raise
        return Verdict(None, f"a step failed while it was timed ({type(error).__name__})")
    left_s = loop_ms * steps / 1e3
    lasting = left_s >= WORTH_SECONDS
    if auto and not lasting:
        return Verdict(None, f"{TOO_SHORT}: about {left_s:.1f} s one after the other", lasting=False)
    reason, began = "", time.perf_counter()
    timed: list[tuple[float, Arrangement]] = []
    with stack.untouched():
        for arrangement in arrangements(lanes, stack.device, torch.get_num_threads())[: None if lasting else 1]:
            if len(timed) > 1 and time.perf_counter() - began > MEASURING_FRAC * left_s:
                break
            try:
                with contextlib.closing(vmap(arrangement)) as gradients:
                    timed.append((_ms(gradients, updates, stack.device), arrangement))
            except CannotBatch as error:
                reason = reason or str(error)
    why = "the fastest here" if auto else "asked for"
    measured = {"loop": loop_ms} | {str(arrangement): ms for ms, arrangement in timed}
    rounded = {name: float(f"{ms:.3g}") for name, ms in measured.items()}
    reason = "" if timed else reason
    for ms, arrangement in sorted(timed):
        if auto and ms >= loop_ms:
            break
        found = Verdict(arrangement, why, rounded, lanes, lasting)
        verdict = _checked(LoopGradients(workload, stack), stack, vmap, updates, found)
        if verdict.arrangement is not None:
            return verdict
        reason = verdict.reason
    return Verdict(None, reason) if reason else Verdict(None, why, rounded, lanes, lasting)


def _checked(loop: LoopGradients, stack: LaneStack, vmap: Vmap, updates: Sequence[Update], known: Verdict) -> Verdict:
    """Return a verdict that was found on other lanes, if the traced program is right for these too."""
    if known.arrangement is not None:
        try:
            with contextlib.closing(vmap(known.arrangement)) as gradients:
                verify(stack, loop, gradients, updates)
        except CannotBatch as error:
            return Verdict(None, str(error))
    return known


def _ms(gradients: Gradients, updates: Sequence[Update], device: torch.device, *, enough_ms: float = 0.0) -> float:
    """Return the milliseconds of one step, the shortest of those that fit into `TIMED_SECONDS`, or the first below enough."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    gradients(updates[0])
    began, best = now(), math.inf
    while True:
        start = now()
        gradients(updates[1])
        end = now()
        best = min(best, end - start)
        if end - began > TIMED_SECONDS or best * 1e3 < enough_ms:
            return best * 1e3


def _kind(workload: Workload, config: TrainConfig, stack: LaneStack, wanted: str) -> tuple[Hashable, ...]:
    """Return what a choice depends on, the number of lanes and of steps aside."""
    machine = platform.node(), platform.machine(), os.cpu_count(), torch.__version__, torch.get_num_threads()
    shared = config.batch_size, config.accumulate_steps, config.precision, config.bn_stat_examples
    model = tuple(stack.shapes), stack.values.dtype, str(stack.device), len(set(stack.streams))
    return workload.name, wanted, machine, shared, model


_lasting: dict[str, Verdict] = {}
"""What was found in this process for kinds of stacks; the file keeps what was found for single trainings."""


def recall(kind: tuple[Hashable, ...], *, lanes: int, steps: int) -> Verdict | None:
    """Return what this process found for stacks of this kind, or what the same training took on this machine before."""
    own = _size(lanes)
    for size in (own, *(2 * own << k for k in range(10))) if own > 1 else (own,):
        found = _lasting.get(_key(kind, size))
        if found is not None and (size == own or (found.arrangement and found.arrangement.lanes_per_call == 1)):
            return found
    calls, *rest = _choices()[1].get(_key(kind, lanes, steps), [None])
    return _kept(kind, Verdict(calls and Arrangement(*calls), *rest), lanes) if rest else None


def remember(kind: tuple[Hashable, ...], verdict: Verdict, *, lanes: int, steps: int) -> None:
    """Keep a choice: on this machine for the same training, in this process for others of its kind where it is lasting."""
    path, known = _choices()
    with contextlib.suppress(OSError):  # where nothing can be kept, the next command measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        kept = dict(list(known.items())[-REMEMBERED:]) | {_key(kind, lanes, steps): verdict}
        fresh.write_text(json.dumps(kept))
        fresh.replace(path)
    _kept(kind, verdict, lanes)


def _kept(kind: tuple[Hashable, ...], verdict: Verdict, lanes: int) -> Verdict:
    """Return a verdict; a lasting one is known from now on for stacks of this kind."""
    lasting = verdict
    if verdict.arrangement is not None and 1 < verdict.arrangement.lanes_per_call == lanes:
        lasting = verdict._replace(arrangement=verdict.arrangement._replace(lanes_per_call=ALL))
    if verdict.lasting:
        _lasting[_key(kind, _size(lanes))] = lasting
    return verdict


def _choices() -> tuple[Path, dict[str, Any]]:
    """Return the file that keeps the choices of this user, and what it holds."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get("WORKBENCH_CACHE") or user / "workbench") / "gradient_backends.json"
    try:
        return path, dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return path, {}


def _key(*parts: Hashable) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _size(lanes: int) -> int:
    return 1 << (lanes - 1).bit_length()  # the power of two that the number of lanes is counted as
