"""`Hook`: the four moments at which an observer is called, what it sees there, and the observers that come with the package.

on_start(run)                 after the model is built, before step 0 (or the step that a resumed run goes on with)
on_step(step)                 once an update: gradient known, update computed, not yet applied
on_evaluation(row)            after each evaluated metric
on_end(record)                always, also after an error or an interrupt, and when another hook's on_end raised

Trials that train together are lanes: each of these is called once for all of them, and the leading axis of every tensor
is the lane. `on_end` then gets a study's record that shows these trials.

What a hook is given is live, not a copy: a tensor changed in place would change the training. Clone what you alter.
Hooks add columns to the record; losses are bitwise equal with and without them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.instruments.losses import logits as look
from workbench.instruments.losses.logits import is_compiled, may_have_logits
from workbench.instruments.norms import stacked
from workbench.record.metrics import check_metric
from workbench.record.read import StudyRecord, TrialRecord
from workbench.train.forward import MicroBatches, autocast
from workbench.train.rng import isolated_rng

if TYPE_CHECKING:
    from workbench.workloads.base import Workload

__all__ = ["Hook", "Logits", "Norms", "Timing"]


@dataclass
class Run:
    """What a hook may look at for the whole run: one trial, or several that train together as lanes.

    Attributes:
        models: the models being trained, one per lane; read only.
        configs: how, lane by lane.
        parameter_slices: name of each trained parameter -> its place in the flat tensors of a `Step`.
        trials: number of each lane's trial; a lane that diverged or ended leaves them.
        step: the step in progress, for hooks that attach to the model's forward pass.
        batches: the micro-batches that it trains on, of each seed.
    """

    models: Sequence[nn.Module]
    workload: Workload
    configs: Sequence[TrainConfig]
    device: torch.device
    parameter_slices: Mapping[str, slice]
    trials: tuple[int, ...] = (0,)
    step: int = 0
    batches: Sequence[MicroBatches] = ()

    @property
    def model(self) -> nn.Module:
        """The model of the first lane, which is the only one where a trial is trained alone."""
        return self.models[0]

    @property
    def config(self) -> TrainConfig:
        """The config of the first lane."""
        return self.configs[0]


@dataclass(slots=True)
class Step:
    """One step as a hook sees it: device tensors, lane axis first, measured before the update is applied.

    The tensors are the trainer's own and must not be changed in place; `params`, `grad` and `update` hold other values a
    step later, so clone what you keep.

    Attributes:
        index: the step, from 0.
        loss: shape (lanes,), as are `grad_norm`, before clipping, and `lr`.
        params: flat parameters before the update, shape (lanes, parameters), as are `grad`, after clipping, and `update`, which will
            be subtracted.
        data_wait_s: how long the loop waited for the batch.
        step_time_s: host time since the previous step began, evaluation left out; of all lanes together.
        trials: number of each lane's trial.
    """

    index: int
    loss: Tensor
    grad_norm: Tensor
    lr: Tensor
    params: Tensor
    grad: Tensor
    update: Tensor
    data_wait_s: float
    step_time_s: float
    trials: tuple[int, ...] = (0,)
    recorded: dict[str, Tensor | float] = field(default_factory=dict)

    def record(self, name: str, value: Tensor | float) -> None:
        """Add a column to this step's row: a number, or a tensor of one element per lane that stays on its device.

        Raises:
            UnknownNameError: the name is not in `workbench.record.metrics.METRICS` and does not begin with "user/".
        """
        check_metric(name)
        self.recorded[name] = value


class Hook:
    """Base of all hooks; override what you need. A hook observes: it changes neither model nor random state.

    Attributes:
        reads_gradient: whether `on_step` reads `Step.grad`; where no hook does, the update takes its memory.
    """

    reads_gradient = True

    def on_start(self, run: Run) -> None:
        """Look at the run before its first step; attach to the model here."""

    def on_step(self, step: Step) -> None:
        """Look at one step; keep values on the device, `step.record(name, value)` stores them."""

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """Look at one row of `.evals`; it cannot be changed."""

    def on_end(self, record: TrialRecord | StudyRecord) -> None:
        """Detach whatever `on_start` attached; called exactly once for each `on_start`.

        An error raised here reaches the caller after all hooks were called, unless training itself raised one before.
        """


def watchers(model: nn.Module) -> int:
    """Return how many hooks look at the passes through the modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


class Timing(Hook):
    """Records `data_wait_s` and `step_time_s` at every step.

    Both are host times. On an accelerator the host runs ahead of the device, so single values are launch times; their
    mean over many steps is the true step time. Healthy: the wait is a few percent of the step (P1.1).
    """

    reads_gradient = False

    def on_step(self, step: Step) -> None:
        """Store what the loop measured."""
        step.record("data_wait_s", step.data_wait_s)
        step.record("step_time_s", step.step_time_s)


class Norms(Hook):
    """Records `update_norm` and `param_norm` at every so many steps, the first included; the trainer records the gradient's norm.

    Healthy: the update is 1e-4 to 1e-2 of the parameters (rule of thumb) and both change slowly.
    """

    reads_gradient = False

    def __init__(self, every: int = 20) -> None:
        self.every = check_integer("every", every, hint=": measure at every n-th step")

    def on_step(self, step: Step) -> None:
        """Measure on the cadence."""
        if step.index % self.every == 0:
            step.record("update_norm", torch.linalg.vector_norm(step.update, dim=1))
            step.record("param_norm", torch.linalg.vector_norm(step.params, dim=1))


class Logits(Hook):
    """Records `attention_logit`, of all layers and per layer, `output_log_z` and `output_logit` at every so many steps, four times a run at least.

    A model that attends or predicts tokens, by the names of its modules, makes a forward pass more on the step's first micro-batch, in a
    copy that shares its weights: nothing is drawn for it, and what its modules keep stays as it is. Of others, and of compiled ones,
    nothing is recorded. Healthy: attention logits below 100, log Z that stays within some ten nats of 0.
    """

    reads_gradient = False

    def __init__(self, every: int = 50) -> None:
        self.every = check_integer("every", every, hint=": measure at every n-th step")
        self._run: Run | None = None

    def on_start(self, run: Run) -> None:
        """Tell whether there may be something to see."""
        looks = run.workload.step is None and may_have_logits(run.model) and not is_compiled(run.model)
        self._run = run if looks else None

    def on_step(self, step: Step) -> None:
        """Measure on the cadence; a model that has no such logits, or raises, is left alone from then on."""
        if self._run is None:
            return
        if step.index % max(min(self.every, max(config.total_steps for config in self._run.configs) // 4), 1):
            return
        try:
            found = [self._look(*lane) for lane in zip(self._run.models, self._run.configs, strict=True)]
            names = [name for name in found[0] if all(name in columns for columns in found)]
            seen = {name: stacked([columns[name] for columns in found]) for name in names}
        except Exception:
            seen = {}
        for name, values in seen.items():
            step.record(name, values)
        if not seen:
            self._run = None

    def _look(self, model: nn.Module, config: TrainConfig) -> dict[str, Tensor]:
        assert self._run is not None
        batch = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, self._run.batches[0][0][0])
        shared = [*model.parameters(), *(t for part in model.modules() for t in vars(part).values() if _in_a_graph(t))]
        logits, model = look.Logits(), copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
        with torch.no_grad(), isolated_rng(), autocast(self._run.device, config.precision):
            logits.begin(model, batch)
            try:
                self._run.workload.forward(model, batch)
            finally:
                logits.end()
        return logits.take()


def _in_a_graph(value: Any) -> bool:
    """Tell whether this is a tensor that cannot be copied with its module."""
    return isinstance(value, Tensor) and value.grad_fn is not None


class Pause(Hook):
    """Waits for `seconds` during one step, as a preempted job would (P2.8); the pause shows in `step_time_s` of the next one."""

    reads_gradient = False

    def __init__(self, step: int, seconds: float) -> None:
        self.step, self.seconds = step, seconds

    def on_step(self, step: Step) -> None:
        """Wait where it is time to."""
        if step.index == self.step:
            time.sleep(self.seconds)
