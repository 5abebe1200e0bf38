"""`LaneStack`: the weights of K trials of one architecture, stacked along a leading lane axis; `LossScale`: that of a float16 lane.

The parameters of lane k are views of row k in its model, and so are its buffers. One tensor per kind makes the global
norm, clipping and every update rule a handful of operations for all lanes together; a single trial is K = 1. The loss of float16 is
multiplied before its gradient is taken, as by `torch.amp.GradScaler` with its defaults: a gradient that overflows makes no update and
halves the scale; 2,000 in a row that do not double it.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import WorkbenchError, WorkloadError
from workbench.train.rng import LaneRng, capture_rng, seed_all
from workbench.workloads.base import Workload
from workbench.workloads.batch_norm import ghost_batch_norm, remember_updates
from workbench.workloads.checks import check_model

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # defaults of `torch.amp.GradScaler`


class _Updater(Protocol):
    def update(
        self, params: Tensor, grad: Tensor, lr: Tensor, step: int, host_lr: Any = None, *, out: Tensor | None = None
    ) -> Tensor: ...

    def skip(self, lane: int) -> None: ...


class LossScale:
    """The scale of one lane, and how many updates have been made since it changed."""

    def __init__(self) -> None:
        self.value, self._since = FIRST, 0

    def differentiate(self, value: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the unscaled gradients of a loss, None where it does not depend on a parameter."""
        scaled = value * torch.tensor(self.value, device=value.device)
        grads = torch.autograd.grad(scaled, parameters, allow_unused=True)
        return [None if g is None else g / self.value for g in grads]

    def settle(self) -> bool:
        """Make the scale smaller, for who wants a gradient and trains nothing; tell whether it could be."""
        above = self.value > 1.0
        self.value = max(1.0, self.value / 16)
        return above

    def advance(self, *, finite: bool) -> None:
        """Go on from a step whose gradient was finite or not."""
        self._since = self._since + 1 if finite else 0
        if not finite:
            self.value *= BACKOFF
        elif self._since == INTERVAL:
            self.value, self._since = self.value * GROWTH, 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values."""
        return {"loss_scale": [self.value, self._since]}

    def load(self, stored: dict[str, Any]) -> None:
        """Go back to what a checkpoint keeps."""
        self.value, self._since = float(stored["loss_scale"][0]), int(stored["loss_scale"][1])


def update_unless_overflown(
    scale: LossScale | None, updater: _Updater, params: Tensor, grad: Tensor, *how: Any, out: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Return the update, zero where a scaled gradient overflowed, and what is recorded of the scale; nothing without one."""
    if scale is None:
        return updater.update(params, grad, *how, out=out), {}
    finite = bool(torch.isfinite(grad).all())
    recorded = {"loss_scale": scale.value, "skipped": float(not finite)}
    scale.advance(finite=finite)
    if finite:
        return updater.update(params, grad, *how, out=out), recorded
    updater.skip(0)
    return torch.zeros_like(params), recorded


def build_model(workload: Workload, config: TrainConfig, device: torch.device) -> nn.Module:
    """Return a fresh model on `device`, initialised under `shared_seed`, checked and in the config's precision.

    With `bn_stat_examples` its batch norm layers take their statistics from so many examples (P6.5); with `accumulate_steps` their
    running statistics look back on as many updates as without.
    """
    seed_all(config.shared_seed)
    try:
        model = workload.build_model()
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"workload {workload.name!r}: build_model raised {type(error).__name__}: {error}. Call it alone to see where."
        ) from error
    check_model(model)
    tell_uncalled(model)
    if config.bn_stat_examples is not None:
        model = ghost_batch_norm(model, config.bn_stat_examples)
    remember_updates(model, config.accumulate_steps)
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(config.precision or "")
    return model.to(device=device, dtype=dtype)


class LaneStack:
    """What the forward and backward passes of K lanes read and write; lane k is row k everywhere.

    Tied weights count once; frozen parameters have rows of their own, because each lane has its own initialisation. All tensors are
    replaced by `keep`: read them anew for each step.

    Attributes:
        parameters: the trained parameters of each lane's model, in the order of `names`.
        values: trained parameters, shape (lanes, parameters).
        grad: their gradient, same shape; each parameter's `.grad` is a view of it.
        frozen: name -> parameters that are not trained, shape (lanes, ...).
        buffers: name -> shape (lanes, ...).
        scale: of the loss in float16, where a stack has one lane; else None.
    """

    def __init__(
        self, workload: Workload, configs: Sequence[TrainConfig], device: torch.device, *, streams: Sequence[int] = ()
    ) -> None:
        self.device, self.precision = device, configs[0].precision
        self.scale = LossScale() if self.precision == "float16" else None
        self.streams = list(streams) or [0] * len(configs)
        self.values = self.grad = torch.empty(0)
        self.frozen: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.names: list[str] = []
        self.slices: list[slice] = []
        self.shapes: list[torch.Size] = []
        self.models: list[nn.Module] = []
        self.parameters: list[list[nn.Parameter]] = []
        random_states = []
        for lane, config in enumerate(configs):
            self._place(build_model(workload, config, device), lane, lanes=len(configs), seed=config.shared_seed)
            seed_all(config.shared_seed, config.per_host_seed)
            random_states.append(capture_rng())
        self.rng = LaneRng(random_states, device)

    def __len__(self) -> int:
        """Lanes in the stack."""
        return len(self.models)

    def collect(self, lane: int, grads: Sequence[Tensor | None], *, add: bool) -> None:
        """Copy one lane's per-parameter gradients into its row, or add them to it; None is zero."""
        flat = [
            self.values.new_zeros(where.stop - where.start) if g is None else g.to_dense().reshape(-1)
            for g, where in zip(grads, self.slices, strict=True)
        ]
        row = self.grad[lane]
        if add:
            row.add_(torch.cat(flat))
        else:
            torch.cat(flat, out=row)

    def accumulators(self, lane: int, *, add: bool) -> list[nn.Parameter]:
        """Return one lane's parameters, with `.grad` in its row of the gradient, zero unless what is there is added to."""
        row = self.grad[lane] if add else self.grad[lane].zero_()
        for p, where in zip(self.parameters[lane], self.slices, strict=True):
            p.grad = row[where].view(p.shape)
        return self.parameters[lane]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all lanes but these, and pack the rest together."""
        for lane, model in enumerate(self.models):
            for name, buffer in model.named_buffers():  # a model may have replaced one instead of writing into it
                if name in self.buffers and buffer.data_ptr() != self.buffers[name][lane].data_ptr():
                    self.buffers[name][lane].copy_(buffer)
        index = torch.tensor(list(rows), device=self.device)
        self.values = self.values.index_select(0, index)
        self.grad = torch.zeros_like(self.values)
        self.frozen = {name: t.index_select(0, index) for name, t in self.frozen.items()}
        self.buffers = {name: t.index_select(0, index) for name, t in self.buffers.items()}
        self.models = [self.models[row] for row in rows]
        self.parameters = [self.parameters[row] for row in rows]
        self.streams = [self.streams[row] for row in rows]
        self.rng.keep(rows)
        for lane, model in enumerate(self.models):
            self._bind(model, lane)

    def make_room(self, numbers: int) -> Tensor:
        """Allocate `numbers` more behind the gradient; return all of it, shape (lanes * parameters + numbers,)."""
        whole = self.grad.new_zeros(self.grad.numel() + numbers)
        self.grad = whole[: self.grad.numel()].view_as(self.grad)
        for lane, model in enumerate(self.models):
            self._bind(model, lane)
        return whole

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Restore buffers and random state after the block; gradients are left as they are."""
        buffers = {name: t.clone() for name, t in self.buffers.items()}
        states = [self.rng.state(lane) for lane in range(len(self))]
        try:
            yield
        finally:
            for name, tensor in buffers.items():
                self.buffers[name].copy_(tensor)
            for lane, state in enumerate(states):
                self._bind(self.models[lane], lane)
                self.rng.load(lane, state)

    def _place(self, model: nn.Module, lane: int, *, lanes: int, seed: int) -> None:
        trained = _trained(model)
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        buffers = dict(model.named_buffers())
        shapes = [p.shape for _, p in trained]
        if lane == 0:
            _check_dtypes([p for _, p in trained])
            self.names = [name for name, _ in trained]
            self.shapes = shapes
            ends = [0, *itertools.accumulate(p.numel() for _, p in trained)]
            self.slices = [slice(a, b) for a, b in itertools.pairwise(ends)]
            first = trained[0][1]
            self.values = torch.empty((lanes, ends[-1]), dtype=first.dtype, device=first.device)
            self.frozen = {name: p.new_empty((lanes, *p.shape)) for name, p in frozen.items()}
            self.buffers = {name: b.new_empty((lanes, *b.shape)) for name, b in buffers.items()}
        elif self.names != [name for name, _ in trained] or self.shapes != shapes:
            raise WorkloadError(
                f"build_model returned another architecture under shared_seed={seed} than for the trials before it. Its "
                "shapes must not depend on the seed: lanes that train together are stacked."
            )
        for (_, p), where in zip(trained, self.slices, strict=True):
            self.values[lane, where].copy_(p.detach().reshape(-1))
            p.data = self.values[lane, where].view(p.shape)  # frees its memory before the gradient takes some
        if lane == 0:
            self.grad = torch.zeros_like(self.values)
        for name, tensor in (frozen | buffers).items():
            (self.frozen if name in frozen else self.buffers)[name][lane].copy_(tensor.detach())
        self._bind(model, lane)
        self.models.append(model)
        self.parameters.append([p for _, p in trained])

    def _bind(self, model: nn.Module, lane: int) -> None:
        """Make the model's parameters and buffers views of its row; an alias stays an alias."""
        for (_, p), where in zip(_trained(model), self.slices, strict=True):
            p.data = self.values[lane, where].view(p.shape)
            p.grad = self.grad[lane, where].view(p.shape)
        for name, p in model.named_parameters():
            if name in self.frozen:
                p.data = self.frozen[name][lane]
        rows = {id(buffer): self.buffers[name][lane] for name, buffer in model.named_buffers()}
        for module in model.modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[leaf] = rows[id(buffer)]


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _check_dtypes(parameters: Sequence[nn.Parameter]) -> None:
    kinds = sorted({str(p.dtype) for p in parameters})
    if len(kinds) > 1 or any(p.is_complex() for p in parameters):
        raise WorkloadError(
            f"the model's trained parameters have dtypes {', '.join(kinds)}; one real dtype is needed. Call .float() in "
            "build_model, or set precision='float32'; precision='bfloat16' runs the forward pass in bfloat16."
        )


_FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric")
_told: set[type] = set()


def uncalled_hooks(model: nn.Module) -> list[str]:
    """Return the names of Lightning's hooks that the class of a model defines, in order; none for any other model."""
    kinds = type(model).__mro__
    own = next(
        (k for k in kinds if k.__name__ == "LightningModule" and k.__module__.split(".")[0] in _FRAMEWORKS), None
    )
    if own is None:
        return []
    names = [name for kind in kinds[: kinds.index(own)] for name in vars(kind)]
    hooks = [n for n in names if n[0] != "_" and callable(getattr(own, n, None)) and not hasattr(nn.Module, n)]
    return list(dict.fromkeys(hooks))


def tell_uncalled(model: nn.Module) -> None:
    """Log once a class which of its hooks this trainer does not call."""
    kind = type(model)
    if kind in _told or not (hooks := uncalled_hooks(model)):
        return
    _told.add(kind)
    logging.getLogger(__name__).warning(
        "%s is a LightningModule, and Lightning does not train here: %s %s not called. What they do goes into forward, loss, metrics, "
        "optimizer and schedule; forward=lambda model, batch: model.training_step(batch, 0) with loss=lambda outputs, batch: outputs takes "
        "a step as it is. Or keep your Trainer and give it wb.callbacks.lightning().",
        kind.__name__, ", ".join(hooks), "is" if len(hooks) == 1 else "are",
    )  # fmt: skip
