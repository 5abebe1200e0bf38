"""`TrainConfig`: everything that decides how one trial is trained, and nothing about where it runs."""

from __future__ import annotations

import dataclasses
import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from workbench.checks import check_integer, check_number
from workbench.errors import ConfigError, UnknownNameError, nearest

OptimizerName = Literal["sgd", "momentum", "nesterov", "rmsprop", "adam", "nadam", "adamw"]
ScheduleName = Literal["constant", "linear", "cosine"]
Rules = Literal["torch", "playbook"]
Precision = Literal["float32", "float64", "bfloat16", "float16"]

OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


def shows_fields(kind: type[Any]) -> None:
    """Have help() and Shift+Tab show the fields of a dataclass, not its `__new__`, which takes anything."""
    kind.__signature__ = inspect.signature(partial(kind.__init__, None))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How one trial is trained. Only `peak_lr`, `total_steps` and `batch_size` are required.

    The defaults of the optimizer constants are those of `torch.optim`, except momentum 0.9 (common practice) and rho
    0.9 (RMSProp's first description), both rules of thumb: the update rules come without constants (F7.7).

    Attributes:
        optimizer: one of `OPTIMIZERS`, or a factory `(params, lr) -> torch.optim.Optimizer`. One whose first parameter is called `model`
            or `named_parameters` is given the model, or pairs of name and trained parameter, instead. A group's `lr_scale` (as timm's
            layer decay writes it) multiplies its lr.
        momentum: gamma of momentum, nesterov and rmsprop (0.0 is `torch.optim.RMSprop`'s default).
        rho: decay of RMSProp's second moment.
        beta1: decay of the first moment (adam, nadam, adamw).
        beta2: decay of the second moment (adam, nadam, adamw).
        eps: added to the denominator of the adaptive rules.
        weight_decay: coupled L2, except for adamw, where it is decoupled.
        rules: "torch" or "playbook" where the two differ (F7).
        peak_lr: learning rate at the top of the schedule.
        schedule: "constant", "linear", "cosine", a function of progress in [0, 1] that returns a factor, or one whose first parameter is
            called `optimizer` (or opt) and that returns a scheduler of torch, stepped once an update; trials of other lengths are told by a
            second parameter, the number of steps.
        warmup_steps: length of a linear ramp from 0 at step 0 to peak_lr; the schedule has the remaining steps to itself.
        total_steps: every update, warmup included.
        batch_size: examples that one update sees in all, however they are split. Each epoch is shuffled anew, and what is left for less than a
            batch is dropped; an iterable dataset keeps its own order.
        accumulate_steps: micro-batches per update; batch norm's running statistics forget by updates, not by micro-batches.
        max_grad_norm: clipping threshold on the global L2 norm; None is off.
        precision: None trains the model as built; or "float32", "float64", "bfloat16" (autocast), "float16" (autocast with a scaled loss, as by
            `torch.amp.GradScaler`: updates whose gradient overflows are skipped, and recorded as `skipped`).
        eval_every_steps: evaluation interval in steps, never seconds (P2.8); None is ten evaluations a run.
        eval_batch_size: examples in a batch of evaluation, at least `batch_size` (P2.7); None is four times `batch_size`.
        select: the `split/metric` that retrospective selection compares (P4.5).
        select_mode: "min" or "max".
        keep_best: how many best checkpoints are kept (P4.4).
        checkpoint_every_steps: None is with every evaluation.
        bn_stat_examples: examples in a batch-norm statistic; None is as the model does.
        shared_seed: model initialisation, equal on all hosts (P7.5).
        per_host_seed: mixed with each host's rank; decides order and preprocessing of the data (P7.6).
    """

    peak_lr: float
    total_steps: int
    batch_size: int
    optimizer: OptimizerName | Callable[..., Any] = "momentum"
    momentum: float = 0.9
    rho: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    rules: Rules = "torch"
    schedule: ScheduleName | Callable[[float], float] | Callable[..., Any] = "constant"
    warmup_steps: int = 0
    accumulate_steps: int = 1
    max_grad_norm: float | None = None
    precision: Precision | None = None
    eval_every_steps: int | None = None
    eval_batch_size: int | None = None
    select: str = "validation/loss"
    select_mode: Literal["min", "max"] = "min"
    keep_best: int = 3
    checkpoint_every_steps: int | None = None
    bn_stat_examples: int | None = None
    shared_seed: int = 0
    per_host_seed: int = 0

    def __new__(cls, *_: Any, **given: Any) -> TrainConfig:
        """Refuse what is no field, with the nearest one, and a seed that does not say whether it is shared (P7.7)."""
        _known(given)
        return super().__new__(cls)

    if not TYPE_CHECKING:  # which finds a wrong name by itself

        def __getattr__(self, name: str) -> Any:
            """Refuse what is no field, with the nearest one."""
            if not name.startswith("_"):
                try:
                    check_names(TrainConfig, [name], also_called=_ALSO_CALLED)
                except UnknownNameError as error:
                    raise AttributeError(str(error)) from None
            raise AttributeError(name)

    def __post_init__(self) -> None:
        """Check every field; raise `ConfigError` or `UnknownNameError` with the field's name in it."""
        check_number("peak_lr", self.peak_lr)
        for name in ("total_steps", "batch_size", "accumulate_steps", "keep_best"):
            check_integer(name, getattr(self, name))
        for name in ("warmup_steps", "shared_seed", "per_host_seed"):
            check_integer(name, getattr(self, name), low=0)
        for name in ("eval_every_steps", "eval_batch_size", "checkpoint_every_steps", "bn_stat_examples"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        for name in ("momentum", "rho", "beta1", "beta2"):
            check_number(name, getattr(self, name), low=0.0, below=1.0)
        for name in ("eps", "weight_decay"):
            check_number(name, getattr(self, name), low=0.0)
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm)
        _choice(self, "optimizer", OPTIMIZERS)
        _choice(self, "schedule", SCHEDULES)
        _choice(self, "rules", get_args(Rules))
        _choice(self, "select_mode", ("min", "max"))
        if self.precision is not None:
            _choice(self, "precision", get_args(Precision))
        self._check_relations()

    def _check_relations(self) -> None:
        if self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} must be below total_steps={self.total_steps}: total_steps counts "
                "every update, warmup included. Prepend a warmup by raising total_steps by the same number."
            )
        if self.eval_batch_size is not None and self.eval_batch_size < self.batch_size:
            raise ConfigError(
                f"eval_batch_size={self.eval_batch_size} must be at least batch_size={self.batch_size}: evaluation "
                "keeps no activations, so a larger batch costs less (P2.7). Leave it out for four times batch_size."
            )
        if self.batch_size % self.accumulate_steps:
            raise ConfigError(
                f"batch_size={self.batch_size} must be a multiple of accumulate_steps={self.accumulate_steps}: "
                "batch_size counts the examples of a whole update."
            )
        if "/" not in self.select:
            raise ConfigError(f"select={self.select!r} must be 'split/metric', for example 'validation/loss'.")

    @property
    def eval_interval(self) -> int:
        """Steps between evaluations, the default resolved: ten a run."""
        return self.eval_every_steps or max(1, math.ceil(self.total_steps / 10))

    @property
    def checkpoint_interval(self) -> int:
        """Steps between checkpoints, the default resolved: with every evaluation."""
        return self.checkpoint_every_steps or self.eval_interval

    @property
    def evaluation_batch(self) -> int:
        """Examples per evaluation batch, the default resolved: four times the training batch."""
        return self.eval_batch_size or 4 * self.batch_size

    def replace(self, **changes: Any) -> TrainConfig:
        """Return a copy with `changes`; an unknown field is an `UnknownNameError` naming the nearest one."""
        _known(changes)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain JSON values; a callable becomes `module:qualname#hash of its code`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: code_name(value) if callable(value) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build a config from plain values; unknown or missing keys are errors that name them."""
        _known(values)
        missing = [name for name in ("peak_lr", "total_steps", "batch_size") if name not in values]
        if missing:
            raise ConfigError(
                f"TrainConfig needs {', '.join(missing)}; given: {', '.join(sorted(values)) or 'nothing'}."
            )
        return cls(**values)

    @property
    def has_callables(self) -> bool:
        """Whether the optimizer or the schedule is a function of the user's own, which no text can stand for."""
        return callable(self.optimizer) or callable(self.schedule)

    def paste(self, **changes: Any) -> str:
        """Return Python source of this config with `changes`, ready to paste.

        What differs from the defaults is written out. With a function of the user's own in it, the source changes
        `workload.config` instead.
        """
        if self.has_callables:
            return _call("workload.config.replace", changes) if changes else "workload.config"
        fields = dataclasses.fields(self)
        config = self.replace(**changes)
        return _call("wb.TrainConfig", {f.name: v for f in fields if (v := getattr(config, f.name)) != f.default})


shows_fields(TrainConfig)


def is_callable_name(value: object) -> bool:
    """Tell whether a stored optimizer or schedule is the name of a function, not one of ours."""
    return isinstance(value, str) and ":" in value


def shown_name(value: str) -> str:
    """Return the name of an optimizer or schedule as who chose it knows it: a function's own, without where it is kept."""
    if value.startswith("workbench.programs.own_config:"):  # a stand-in
        return "the program's own"
    name = value.partition("#")[0].rpartition(":")[2] if is_callable_name(value) else value
    return "your own lambda" if "<lambda>" in name else name


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return "\n".join([f"{name}(", *(f"    {key}={value!r}," for key, value in arguments.items()), ")"])


_ALSO_CALLED = {
    **dict.fromkeys(("lr", "learning_rate", "max_lr", "base_lr"), "peak_lr"),
    **dict.fromkeys(("steps", "max_steps", "num_steps", "iterations"), "total_steps"),
    **dict.fromkeys(
        ("epochs", "max_epochs", "num_epochs"), "total_steps, which is epochs * len(train_data) / batch_size"
    ),
    **dict.fromkeys(("wd", "decay"), "weight_decay"),
    **dict.fromkeys(("bs", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("lr_schedule", "lr_scheduler", "scheduler"), "schedule"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "warmup_steps"),
    **dict.fromkeys(("clip", "grad_clip", "clip_grad_norm", "gradient_clip_val", "max_norm"), "max_grad_norm"),
    **dict.fromkeys(("optim", "optimiser"), "optimizer"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "accumulate_steps"),
    **dict.fromkeys(("dtype", "amp", "fp16", "bf16"), "precision"),
}
"""What other trainers call a field -> the field."""


def _no_unnamed_seed(values: Mapping[str, Any]) -> None:
    if "seed" in values:
        raise ConfigError(
            f"seed={values['seed']!r} does not say which one: training on several hosts needs two. Give shared_seed for what has to "
            "be equal on all hosts (the model's initialisation), and per_host_seed for what has to differ (order and "
            "preprocessing of the data, mixed with the host's rank)."
        )


def _known(values: Mapping[str, Any]) -> None:
    _no_unnamed_seed(values)
    check_names(TrainConfig, values, also_called=_ALSO_CALLED)


def check_names(
    kind: type[Any], values: Iterable[str], *, also_called: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse what is no field of a dataclass, with the nearest one."""
    names = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in names:
            hint = f" Did you mean {also_called[key]}?" if key in also_called else nearest(key, names)
            raise UnknownNameError(f"{kind.__name__} has no field {key!r}.{hint}")


def code_name(value: Callable[..., Any]) -> str:
    """Return `module:qualname#hash of its code`, what a record calls a function."""
    module = getattr(value, "__module__", type(value).__module__)
    return f"{module}:{getattr(value, '__qualname__', type(value).__qualname__)}#{code_hash(value)}"


def code_hash(value: Any) -> str:
    """Return eight hex digits that change with a function's code, constants, defaults and what it closes over."""
    return f"{zlib.crc32(_code_text(value, depth=0).encode()):08x}"


def _code_text(value: Any, *, depth: int) -> str:
    if depth > 8:
        return "..."
    deeper = partial(_code_text, depth=depth + 1)
    if isinstance(value, partial):
        inside = [value.func, *value.args, *(x for pair in sorted(value.keywords.items()) for x in pair)]
        return "partial" + "|".join(map(deeper, inside))
    if isinstance(value, CodeType):
        return value.co_code.hex() + repr(value.co_names) + "|".join(map(deeper, value.co_consts))
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return "|".join(map(deeper, [value.__code__, *(value.__defaults__ or ()), *cells]))
    if isinstance(value, (int, float, complex, str, bytes, bool, type(None))):
        return repr(value)
    if isinstance(value, (tuple, frozenset)) and len(value) <= 100:
        parts = map(deeper, value)
        return type(value).__name__ + "|".join(sorted(parts) if isinstance(value, frozenset) else parts)
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


_TORCH_BASES = {"optimizer": "Optimizer", "schedule": "LRScheduler"}
_FACTORIES = {
    "optimizer": "optimizer=lambda params, lr: torch.optim.{}(params, lr)",
    "schedule": "schedule=lambda optimizer: torch.optim.lr_scheduler.{}(optimizer, ...)",
}


def _choice(config: TrainConfig, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    kind = value if isinstance(value, type) else type(value)
    if (kind is not value or name == "schedule") and _TORCH_BASES.get(name) in {b.__name__ for b in kind.__mro__}:
        what = "is a class" if kind is value else "was made already"
        raise ConfigError(
            f"{name}={kind.__name__}{'' if kind is value else '(...)'} {what}, and each trial makes its own. Write "
            f"{_FACTORIES[name].format(kind.__name__)}."
        )
    if callable(value) and name in ("optimizer", "schedule"):
        return
    if value not in allowed:
        raise UnknownNameError(f"{name}={value!r} is not known.{nearest(value, allowed)}")
