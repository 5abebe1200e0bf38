"""`collect_architecture`: the facts for `diagnose_architecture`, from one traced forward pass of a fresh model."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.errors import WorkbenchError
from workbench.topics.architecture.dataflow import Dataflow, trace_dataflow
from workbench.topics.architecture.joins import Join, find_joins
from workbench.topics.architecture.operations import Operations
from workbench.train.batches import train_batches
from workbench.train.forward import autocast
from workbench.train.lane_stack import build_model
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload

__all__ = ["collect_architecture"]

_WEIGHT_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.Embedding,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
SHOWN = 200  # rule of thumb: more joins or norms than this are counted, not listed


def collect_architecture(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return JSON facts about residual connections, norms and zero-initialised branches (F2.5 to F2.8).

    A fresh model sees its first micro-batch in training mode, and a second time in evaluation mode where a branch was 0, so
    that a branch that was only dropped by chance is not taken for one that begins at zero. The caller's random state is
    left bit for bit as it was, also when it is interrupted.

    Args:
        workload: what to look at.
        config: how it would be trained: the seed of the initialisation, the batch.
        device: where.

    Returns:
        "reason" (None, or why nothing could be traced), "weight_layers" (on the longest way), "norms", "norm_modules" (modules
        of the tree that normalise, run or not), "num_joins", "joins" (one dict each, in the order they ran).

    Raises:
        WorkbenchError: the model cannot be built.
    """
    with isolated_rng():
        model = build_model(workload, config.replace(bn_stat_examples=None), device)
        tree = [name for name, module in model.named_modules() if _normalises(module)]
        found: dict[str, Any] = {"reason": None, "norm_modules": tree[:SHOWN]}
        try:
            batch, _ = next(train_batches(workload, config, device))[0]
            flow = _forward(workload, model.train(), batch, config=config, device=device)
            joins = find_joins(flow)
            if any(join.branch_rms == 0 for join in joins):
                again = find_joins(_forward(workload, model.eval(), batch, config=config, device=device))
                joins = _zero_in_both(joins, again)
        except WorkbenchError:
            raise
        except Exception as error:
            message = (str(error).splitlines() or ["no message"])[0]
            return found | {"reason": f"the forward pass cannot be traced ({type(error).__name__}: {message[:200]})"}
    return found | _facts(flow, joins, matrices=any(isinstance(m, _WEIGHT_LAYERS) for m in model.modules()))


def _forward(
    workload: Workload, model: nn.Module, batch: Any, *, config: TrainConfig, device: torch.device
) -> Dataflow:
    def call() -> Any:
        with autocast(device, config.precision):
            return workload.forward(model, batch)

    return trace_dataflow(model, call, batch)


def _facts(flow: Dataflow, joins: list[Join], *, matrices: bool) -> dict[str, Any]:
    ops = Operations(flow)
    layers = max(ops.depth, default=0)
    reason = None
    if matrices and not layers:
        reason = (
            "no weight layer was seen to work on the batch: the forward pass reaches its tensors by a way that is no "
            "operation on them, such as NumPy, a compiled graph, or matrices that are drawn anew"
        )
    shown = [{key: value for key, value in asdict(join).items() if key != "at"} for join in joins[:SHOWN]]
    return {
        "reason": reason,
        "weight_layers": layers,
        "norms": ops.norms[:SHOWN],
        "num_joins": len(joins),
        "joins": shown,
    }


def _zero_in_both(train: list[Join], evaluation: list[Join]) -> list[Join]:
    """Return the joins of training, without the zeros that chance made; where the two modes differ in form, all stand."""
    if len(train) != len(evaluation):
        return train
    pairs = zip(train, evaluation, strict=True)
    return [replace(t, branch_rms=e.branch_rms) if t.branch_rms == 0 else t for t, e in pairs]


def _normalises(module: nn.Module) -> bool:
    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
    return isinstance(module, kinds)
