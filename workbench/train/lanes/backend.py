"""Which gradient backend a stack of lanes takes: measured once for a model and a batch on a processor, and remembered.

The same command has to give the same digits on a busy machine and on an idle one. So ways are compared by the processor time that
they take in one thread, of ways of about the same cost a fixed order takes the first, and what was decided holds from then on: for a
study by its facts, for other studies of this user by a file.
"""

import contextlib
import functools
import hashlib
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workbench.config import TrainConfig
from workbench.errors import ConfigError, RecordError
from workbench.record.folder import read_json, write_json
from workbench.record.write import StudyWriter
from workbench.train.batches import DataStream
from workbench.train.evaluation import Evaluation
from workbench.train.forward import MicroBatches, is_out_of_memory
from workbench.train.gradients import Excuse, LaneLoss, LoopGradients
from workbench.train.lane import SHARED, room_for_calls
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.vmap_gradients import VmapGradients, verify
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import LaneStack
from workbench.train.steps.own_step import ONE_AT_A_TIME, OwnStep
from workbench.workloads.base import Workload

WORTH_UPDATES = 1000  # rule of thumb: of all lanes together; fewer save less than tracing and measuring take
MEASURED_LANES = (
    4  # rule of thumb: tell calls of many lanes from calls of one; to trace all of 32 takes up to ten times as long
)
MARGIN = 1.25  # rule of thumb: times of the same step differ by as much from one run to the next
# rules of thumb: steps of a way that are timed, as a share of the updates within bounds
TIMED_STEPS, SHARE = (5, 20), 0.005
ALL = 2**31  # lanes in a call: however many there are
WAYS = {"vmap, one lane a call": 1, "vmap": ALL, "loop": None}  # calls of one lane run on several cores at once
"""Way -> lanes in a call of the traced program, None is plain autograd; of ways of about the same cost the first is taken."""
FACT = "gradient_ways"
REASONS = ("the fastest here", "about as fast as the others here", "asked for")
REMEMBERED = 1000  # rule of thumb: choices that are kept on this machine

Gradients = LoopGradients | VmapGradients | OwnStep
Update = Sequence[MicroBatches]


class Verdict(NamedTuple):
    """What was decided for a stack."""

    lanes_per_call: int | None  # of the traced program; None is plain autograd
    reason: str
    measured_ms: Mapping[str, float] = {}  # way -> processor time of a step of so many `lanes`
    lanes: int = 0  # 0 where nothing was measured
    threads: int = 0  # calls at a time, 0 is as many as torch has threads


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
    study: StudyWriter | None = None,
    memory: int | None = None,
    before: Mapping[str, Any] | None = None,
    share: bool = False,
    excused: Excuse | None = None,
    own: OwnStep | None = None,
    beside: Sequence[TrainConfig] = (),
) -> Chosen:
    """Return the gradient backend for a stack that is about to train; the stack is left as it was.

    Args:
        wanted: "loop", "vmap", or "auto": the faster of the two where measuring pays, plain autograd where it does not.
        study: whose facts say what was decided before, and get what is decided now.
        memory: bytes that the stack may take in all; None is a share of what is free now.
        before: what `Chosen.describe` returned when these lanes began, where they go on from checkpoints: the same backend
            gives the same digits (P4.2).
        share: batches are this process's share of those of many.
        own: a person's own step, which takes the place of all this.
        beside: all trials that were asked for together, these among them: the digits are those that all of them would have in one stack.
    """
    loop, beside = LoopGradients(workload, stack, share=share, excused=excused), beside or configs
    if own is not None:
        return Chosen(loop, Verdict(None, ONE_AT_A_TIME), own.under(loop, excused))
    if not steps or wanted == "loop":
        return Chosen(loop, Verdict(None, "asked for" if steps else "no step is left"))
    room = room_for_calls(stack, bound=memory)
    updates: list[Update] = [[stream.peek(2)[i] for stream in streams] for i in range(2)]  # without using them up
    if watched is not None:
        verdict = Verdict(None, f"the hook {watched} watches the forward pass")
    elif before is not None and wanted in ("auto", before["gradients"]):
        verdict = Verdict(
            None if before["gradients"] == "loop" else before["lanes_per_call"], str(before["reason"]),
            before.get("measured_ms", {}), before.get("measured_lanes", 0), before.get("threads", 0),
        )  # fmt: skip
    else:
        verdict = _decided(workload, configs, stack, updates, study, wanted=wanted, steps=steps, beside=beside)
    gradients: VmapGradients | None = None
    if verdict.lanes_per_call is not None:
        calls = min(max(len(stack), 2), verdict.lanes_per_call)
        spread = calls < len(stack) and stack.device.type == "cpu"
        threads = verdict.threads or (torch.get_num_threads() if spread else 1)
        try:
            with contextlib.ExitStack() as undo:
                how: dict[str, Any] = {"lanes_per_call": calls, "threads": threads, "room": room}
                how["apart"] = _apart(configs[0], beside)
                gradients = undo.enter_context(contextlib.closing(VmapGradients(workload, stack, **how)))
                verify(stack, loop, gradients, updates)
                gradients.prepare(updates[0])  # what the record says of the calls has to be so from the first step on
                undo.pop_all()
        except CannotBatch as error:
            verdict, gradients = Verdict(None, str(error)), None
    if wanted == "vmap" and gradients is None:
        raise ConfigError(
            f"gradients='vmap' cannot train {workload.name!r}: {verdict.reason}. Use gradients='auto', which then trains "
            "one lane after the other by plain autograd, or gradients='loop'."
        )
    return Chosen(loop, verdict, gradients)


def decide_for(
    workload: Workload, configs: Sequence[TrainConfig], study: StudyWriter, device: torch.device, *, wanted: str, beside: Sequence[TrainConfig],
) -> None:  # fmt: skip
    """Leave in the study which way these trials go, each with those that could be in its stack, so that all who train some of them take it."""
    for config in configs:
        alike = _alike(config, configs)
        if config is not alike[0] or wanted == "loop" or workload.step is not None:
            continue
        with contextlib.suppress(Exception), isolated_rng():  # who trains says what is wrong
            few = alike[:MEASURED_LANES]
            of = {each.per_host_seed: each for each in few}
            streams = [DataStream(workload, each, device).peek(2) for each in of.values()]
            updates: list[Update] = [*zip(*streams, strict=True)]
            stack = LaneStack(workload, few, device, streams=[[*of].index(each.per_host_seed) for each in few])
            steps = max(each.total_steps for each in alike)
            _decided(workload, alike, stack, updates, study, wanted=wanted, steps=steps, beside=beside)


def _alike(config: TrainConfig, beside: Sequence[TrainConfig]) -> list[TrainConfig]:
    """Return the trials that could be in a stack with this one."""
    return [each for each in beside if all(getattr(each, name) == getattr(config, name) for name in SHARED)]


def _apart(config: TrainConfig, beside: Sequence[TrainConfig]) -> bool:
    """Return whether the trials that could be in a stack with this one have several data orders."""
    return len({each.per_host_seed for each in _alike(config, beside)}) > 1


def _decided(
    workload: Workload, configs: Sequence[TrainConfig], stack: LaneStack, updates: Sequence[Update], study: StudyWriter | None, *,
    wanted: str, steps: int, beside: Sequence[TrainConfig],
) -> Verdict:  # fmt: skip
    """Return what study or user took for such stacks before; else, where it pays, what is measured now, and keep that."""
    known = {} if study is None else study.record.facts.get(FACT, {})
    for alike in (_alike(configs[0], beside), configs):
        kind = _kind(workload, alike, stack, wanted)
        if (verdict := _verdict(known.get(kind))) is not None:
            return verdict
    if wanted == "auto" and steps * len(configs) < WORTH_UPDATES:
        return Verdict(None, f"too short to measure: about {steps * len(configs)} updates in all")
    verdict = _remembered(kind, stack) or _measured(workload, configs, stack, updates, wanted=wanted, steps=steps)
    if verdict.lanes:  # no refusal, whose cause may be mended
        verdict = _remembered(kind, stack, verdict) or verdict
        if study is not None:
            study.add_facts(**{FACT: {**known, kind: verdict[:4]}})
    return verdict


def _measured(
    workload: Workload,
    configs: Sequence[TrainConfig],
    stack: LaneStack,
    updates: Sequence[Update],
    *,
    wanted: str,
    steps: int,
) -> Verdict:
    """Time the ways of training lanes like the first of the stack on its first batches, and return the one to take."""
    measured: dict[str, float] = {}
    reason, lanes = "", min(MEASURED_LANES, len(stack))
    times = min(max(round(SHARE * steps * len(configs)), TIMED_STEPS[0]), TIMED_STEPS[1])
    with isolated_rng(), _one_thread():  # on lanes that are not of the stack, so that no module of it notices
        try:
            few = LaneStack(workload, configs[:lanes], stack.device, streams=stack.streams[:lanes])
            for model in few.models:
                model.train()
            loop = LoopGradients(workload, few)
            loop_ms = _ms(loop, updates, stack.device, times)
        except Exception as error:  # training itself says at which step, and what to look at
            if wanted != "auto" or is_out_of_memory(error):
                raise
            return Verdict(None, f"a step failed while it was timed ({type(error).__name__})")
        for way, calls in WAYS.items():
            if calls is not None and (calls == 1 or lanes > 1):
                try:
                    gradients = VmapGradients(workload, few, lanes_per_call=min(lanes, calls))
                    verify(few, loop, gradients, updates)
                    measured[way] = _ms(gradients, updates, stack.device, times)
                except CannotBatch as error:
                    reason = reason or str(error)
    if not measured:
        return Verdict(None, reason)
    if wanted == "auto":
        measured["loop"] = loop_ms
    taken, *others = measured
    for way in others:  # a clock that runs backwards, or not at all, decides nothing
        taken = way if 0 < MARGIN * measured[way] < measured[taken] else taken
    said = REASONS[0 if measured[taken] == min(measured.values()) else 1] if wanted == "auto" else REASONS[2]
    told = {way: float(f"{ms:.3g}") for way, ms in (("loop", loop_ms), (taken, measured[taken])) if ms > 0}
    return Verdict(WAYS[taken], said, told, lanes)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ms(gradients: Gradients, updates: Sequence[Update], device: torch.device, times: int) -> float:
    """Return the milliseconds of one step, the shortest of so many: processor time of this thread, in which no other process counts."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.thread_time() if device.type == "cpu" else time.perf_counter()

    gradients(updates[0])
    best = math.inf
    for _ in range(times):
        start = now()
        gradients(updates[1])
        best = min(best, now() - start)
    return best * 1e3


def _kind(workload: Workload, configs: Sequence[TrainConfig], stack: LaneStack, wanted: str) -> str:
    """Return a name for stacks that go the same way: of the same model and batch, on the same kind of device."""
    config = configs[0]
    batch = (
        config.batch_size,
        config.accumulate_steps,
        config.precision,
        config.bn_stat_examples,
        len({each.per_host_seed for each in configs}) > 1,
    )
    model = tuple(stack.shapes), str(stack.values.dtype), stack.device.type, len(configs) > 1
    return _key(workload.name, wanted, batch, model)


def _remembered(kind: str, stack: LaneStack, verdict: Verdict | None = None) -> Verdict | None:
    """Return the choice that this user's file keeps for a kind on this machine; where it keeps none, keep this one."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get("WORKBENCH_CACHE") or user / "workbench") / "gradient_backends.json"
    where = torch.cuda.get_device_name(stack.device) if stack.device.type == "cuda" else _processor()
    key, known = _key(kind, where, torch.__version__), dict[str, Any]()
    with contextlib.suppress(OSError, RecordError):
        known = read_json(path)
    kept = _verdict(known.get(key))
    if kept is None and verdict is not None:
        with contextlib.suppress(RecordError):  # where nothing can be kept, the next study measures again
            write_json(path, dict([*known.items()][1 - REMEMBERED :]) | {key: verdict[:4]})
    return kept


def _verdict(stored: Any) -> Verdict | None:
    """Return a choice from the first four of its fields as JSON values, None where there are none."""
    return None if stored is None else Verdict(*stored)


@functools.cache
def _processor() -> str:
    """Return what the machine says of its processor."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return str(sorted({line for line in lines if line.startswith(("vendor_id", "model name", "CPU part"))}))
    return f"{platform.machine()} {platform.processor()}"


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
