"""Programs that were built before: a study trains stack after stack of the same model, and each would trace it anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from torch import Tensor

from workbench.train.lane_memory import lanes_that_fit
from workbench.train.lane_stack import LaneStack
from workbench.train.traced.batch import BatchLayout
from workbench.train.traced.cannot_batch import CannotBatch
from workbench.train.traced.module_state import module_state
from workbench.train.traced.program import LaneProgram, build_program
from workbench.train.traced.step import Objective
from workbench.workloads.base import Workload

__all__ = ["LanePrograms", "forget_programs"]

KEPT_PROGRAMS = 32  # rule of thumb: a program is small, but holds on to its workload
MAX_LAYOUTS = 8  # rule of thumb: batches of more shapes than this cost more in tracing than a traced step saves

_built: OrderedDict[Hashable, tuple[Workload, LaneProgram | CannotBatch]] = OrderedDict()


class LanePrograms:
    """The programs of one stack, shared with other stacks of the same workload and model in this process."""

    def __init__(self, workload: Workload, stack: LaneStack) -> None:
        self._workload, self._stack = workload, stack
        self._model = _signature(stack)
        self._layouts: dict[Objective, set[BatchLayout]] = {}
        self._recent: dict[tuple[Hashable, ...], LaneProgram] = {}

    def get(
        self, layout: BatchLayout, batch: Sequence[Tensor], *, lanes: int, stacked: bool, objective: Objective
    ) -> LaneProgram:
        """Return the program for such a batch, built now where there is none.

        Raises:
            CannotBatch: lanes cannot be computed together, or no two batches look alike.
        """
        key = (layout, lanes, stacked, objective)
        if key not in self._recent:
            layouts = self._layouts.setdefault(objective, set())
            layouts.add(layout)
            if len(layouts) > MAX_LAYOUTS:
                raise CannotBatch(
                    f"batches come in more than {MAX_LAYOUTS} shapes or with changing constants, and each would be traced anew"
                )
            self._recent[key] = self._shared(key, batch)
        return self._recent[key]

    def lanes_that_fit(
        self,
        batch: Sequence[Tensor],
        layout: BatchLayout,
        *,
        lanes: int,
        threads: int,
        objective: Objective,
        room: int | None,
    ) -> int:
        """Return how many lanes a call may take, at most `lanes`: measured on the program of a single lane.

        Args:
            batch: tensors of a batch.
            layout: of that batch.
            lanes: wanted in a call.
            threads: calls at a time.
            objective: of the program.
            room: bytes that all calls in progress may take; None is no bound.
        """
        if room is None or lanes == 1:
            return lanes
        single = self.get(layout, batch, lanes=1, stacked=False, objective=objective)
        return min(lanes, lanes_that_fit(room, lane=single.peak_bytes * threads))

    def _shared(self, key: tuple[BatchLayout, int, bool, Objective], batch: Sequence[Tensor]) -> LaneProgram:
        layout, lanes, stacked, objective = key
        full = (id(self._workload), self._model, *key)
        if full not in _built:
            found: LaneProgram | CannotBatch
            try:
                found = build_program(
                    self._workload, self._stack, layout, batch, lanes=lanes, stacked=stacked, objective=objective
                )
            except CannotBatch as reason:
                found = reason.with_traceback(None)
            _built[full] = (self._workload, found)
            while len(_built) > KEPT_PROGRAMS:
                _built.popitem(last=False)
        _built.move_to_end(full)
        found = _built[full][1]
        if isinstance(found, CannotBatch):
            raise CannotBatch(str(found))
        return found


def forget_programs() -> None:
    """Let go of every program that was built."""
    _built.clear()


def _signature(stack: LaneStack) -> Hashable:
    """Return what two stacks must have in common to share programs, parameters and buffers aside."""
    tensors = {"trained": stack.values} | stack.frozen | stack.buffers
    shapes = tuple((name, t.shape[1:], t.dtype) for name, t in tensors.items())
    names = tuple(zip(stack.names, stack.shapes, strict=True))
    modules = tuple((name, type(module)) for name, module in stack.models[0].named_modules())
    state = module_state(stack.models[0], by_value=True)
    kept = tuple((key, value) for key, value in state.items() if key[1] != "training")
    return stack.device, stack.precision, names, shapes, modules, kept
