"""`ArchitectureStudy`, `collect_architecture`: the audit of a model (F2.4), and what its practices are worth: the largest stable lr over depth (F2.5 to F2.8)."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.curves.judged import judged
from workbench.curves.lr_search import lr_best, unstable_bracket
from workbench.errors import ConfigError, UsageError, WorkbenchError
from workbench.record.read import StudyRecord
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.architecture.dataflow import trace_dataflow
from workbench.topics.architecture.joins import Join, Operations, find_joins
from workbench.topics.lr_sweep.study import LRSweep
from workbench.train.batches import train_batches
from workbench.train.forward import autocast
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload
from workbench.workloads.sklearn_data import deep_residual

Variant = Callable[[int], Workload]

VARIANTS: Mapping[str, Variant] = {
    "plain": lambda depth: deep_residual(depth=depth, residual=False),
    "plain, Norm(f(x))": lambda depth: deep_residual(depth=depth, residual=False, norm="branch"),
    "x + f(x)": lambda depth: deep_residual(depth=depth),
    "x + Norm(f(x))": lambda depth: deep_residual(depth=depth, norm="branch"),
    "Norm(x + f(x))": lambda depth: deep_residual(depth=depth, norm="after_add"),
    "x + f(Norm(x))": lambda depth: deep_residual(depth=depth, norm="pre"),
    "x + f(x), f(x) = 0 at first": lambda depth: deep_residual(depth=depth, zero_init=True),
    "x + Norm(f(x)), 0 at first": lambda depth: deep_residual(depth=depth, norm="branch", zero_init=True),
}


_WEIGHT_LAYERS = (
    nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention,
)  # fmt: skip
_NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
SHOWN = 200  # rule of thumb: more joins or norms than this are counted, not listed


@dataclass(frozen=True, kw_only=True)
class ArchitectureStudy(Study):
    """An audit of one workload's model, and a sweep of the learning rate for each variant of an architecture and each depth.

    The audit is one traced forward pass. The sweeps are studies of their own in the folder `variants` of this one; what they
    found is a table in this record's facts. The trials of a sweep train side by side; they run in this process.

    Attributes:
        variants: name -> function of the depth that returns a workload; None is those of `deep_residual`, {} is the audit alone.
        depths: what the variants are asked for; of `deep_residual`, blocks of two weight layers.
        lrs: the grid, the same for all (rule of thumb: a factor of 2, which is as well as a largest stable lr is known then).
        seeds: trials at each learning rate.
        steps: length of a trial (rule of thumb: what is unstable early shows within a few hundred steps).
    """

    stem: ClassVar[str] = "architecture"

    variants: Mapping[str, Variant] | None = None
    depths: Sequence[int] = (2, 6, 12)
    lrs: Sequence[float] = tuple(2.0**k for k in range(-13, 2))
    seeds: int = 1
    steps: int | None = 300

    def __post_init__(self) -> None:
        """Check every field."""
        LRSweep(lrs=self.lrs, seeds=self.seeds)
        for i, depth in enumerate(self.depths):
            if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
                raise ConfigError(f"depths[{i}]={depth!r} must be an integer of at least 1.")
        if self.variants is not None and not isinstance(self.variants, Mapping):
            raise ConfigError(f"variants={self.variants!r} must map names to functions of the depth, or be None.")
        for name, make in (self.variants or {}).items():
            if not isinstance(name, str) or not name.strip() or not callable(make):
                raise ConfigError(
                    f"variants[{name!r}]={make!r} must be a function of the depth that returns a Workload, under a name: "
                    "{'mine': lambda depth: my_workload(layers=depth)}."
                )

    def settings(self) -> dict[str, Any]:
        """Return the fields as JSON values; a function is what it is called."""
        values = asdict(self)
        named = {name: f"{make.__module__}:{make.__qualname__}" if hasattr(make, "__qualname__") else repr(make) for name, make in (self.variants or {}).items()}  # fmt: skip
        return values | {"variants": None if self.variants is None else named}

    def extend(self, session: Session) -> None:
        """Audit the workload, then run the sweeps of the variants."""
        if "architecture" not in session.record.facts:
            found = collect_architecture(session.workload, session.config, session.device)
            session.facts(architecture=found)
        variants = VARIANTS if self.variants is None else self.variants
        if variants and self.depths and session.executor is not None:
            raise UsageError(
                "wb.architecture.Study trains its variants in this process only: take executor='local', or variants={} for "
                "the audit alone."
            )
        rows: list[dict[str, Any]] = []
        for depth in self.depths:
            for name, make in variants.items():
                workload: Any = make(depth)
                if not isinstance(workload, Workload):
                    kind = type(workload).__name__
                    raise UsageError(f"variants[{name!r}]({depth}) returned {kind}, but must return a Workload.")
                rows.append(self._swept(session, name, depth, workload))
                session.facts(architecture_depths=rows)

    def _swept(self, session: Session, name: str, depth: int, workload: Workload) -> dict[str, Any]:
        folder = session.writer.path / "variants" / f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}_{depth}"
        sweep, note = LRSweep(lrs=self.lrs, seeds=self.seeds, steps=self.steps), f"{name} at depth {depth}, part of an architecture study"  # fmt: skip
        record = sweep.run(workload, session.trainer, out=folder, note=note)
        joins = collect_architecture(workload, workload.config, session.device).get("joins") or []
        starts = bool(joins) and all(join["branch_rms"] == 0 for join in joins)
        return {"variant": name, "depth": depth, **_limits(record, max(self.lrs)), "identity_at_start": starts}


def _limits(record: StudyRecord, highest: float) -> dict[str, Any]:
    """Return the largest stable lr of a sweep with what bounds it, its best lr, and the loss at each (None: not finite)."""
    table = judged(record).sweep()
    best, bracket = lr_best(table), unstable_bracket(table)
    stable = unstable = math.nan
    censored: str | None = "above"
    if best is None:
        none_stable = bool(table.points) and all(point.unstable for point in table.points)
        censored, unstable = ("below", table.points[0].lr) if none_stable else ("untrained", math.nan)
    elif bracket is None:
        stable = highest
    elif bracket.lower is None:
        censored, unstable = "below", bracket.upper
    else:
        censored, stable, unstable = None, bracket.lower, bracket.upper
    best_lr, best_loss = (math.nan, math.nan) if best is None else (best.lr, best.point.loss)
    return {
        "stable_lr": stable,
        "unstable_lr": unstable,
        "censored": censored,
        "best_lr": best_lr,
        "best_loss": best_loss,
        "initial_loss": table.loss_ref,
        "losses": [[point.lr, point.loss if math.isfinite(point.loss) else None] for point in table.points],
    }


def collect_architecture(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return JSON facts about residual connections, norms and zero-initialised branches (F2.5 to F2.8), from one traced forward pass.

    A fresh model sees its first micro-batch in training mode, and a second time in evaluation mode where a branch was 0, so
    that a branch that was only dropped by chance is not taken for one that begins at zero. The caller's random state is
    left bit for bit as it was, also when it is interrupted.

    Returns:
        "reason" (None, or why nothing could be traced), "weight_layers" (on the longest way), "norms", "norm_modules" (modules
        of the tree that normalise, run or not), "num_joins", "joins" (one dict each, in the order they ran), "softmaxes" (operations that may attend).
    """
    with isolated_rng():
        model = build_model(workload, config.replace(bn_stat_examples=None), device)
        tree = [name for name, module in model.named_modules() if isinstance(module, _NORM_LAYERS)]
        found: dict[str, Any] = {"reason": None, "norm_modules": tree[:SHOWN]}
        try:
            batch, _ = next(train_batches(workload, config, device))[0]

            def call() -> Any:
                with autocast(device, config.precision):
                    return workload.forward(model, batch)

            flow = trace_dataflow(model.train(), call, batch)
            joins = find_joins(flow)
            if any(join.branch_rms == 0 for join in joins):
                joins = _zero_in_both(joins, find_joins(trace_dataflow(model.eval(), call, batch)))
        except WorkbenchError:
            raise
        except Exception as error:
            message = (str(error).splitlines() or ["no message"])[0]
            return found | {"reason": f"the forward pass cannot be traced ({type(error).__name__}: {message[:200]})"}
    ops = Operations(flow)
    layers = max(ops.depth(range(len(flow.nodes))).values(), default=0)
    if not layers and any(isinstance(m, _WEIGHT_LAYERS) for m in model.modules()):
        found["reason"] = (
            "no weight layer was seen to work on the batch: the forward pass reaches its tensors by a way that is no "
            "operation on them, such as NumPy, a compiled graph, or matrices that are drawn anew"
        )
    shown = [{key: value for key, value in asdict(join).items() if key != "at"} for join in joins[:SHOWN]]
    attends = sum("softmax" in node.op or "attention" in node.op for node in flow.nodes)
    return found | {"weight_layers": layers, "norms": ops.norms[:SHOWN], "num_joins": len(joins), "joins": shown, "softmaxes": attends}  # fmt: skip


def _zero_in_both(train: list[Join], evaluation: list[Join]) -> list[Join]:
    """Return the joins of training, without the zeros that chance made; where the two modes differ in form, all stand."""
    if len(train) != len(evaluation):
        return train
    pairs = zip(train, evaluation, strict=True)
    return [replace(t, branch_rms=e.branch_rms) if t.branch_rms == 0 else t for t, e in pairs]
