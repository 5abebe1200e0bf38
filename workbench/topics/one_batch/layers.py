"""`find_layers`: how signal, units and gradients fare layer by layer, in one forward and backward pass in training mode."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from workbench.topics.architecture.dataflow import buffers_put_back, trace_dataflow
from workbench.topics.one_batch.batch import OneBatch
from workbench.train.forward import autocast
from workbench.train.rng import seed_all

__all__ = ["find_layers"]

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Bilinear)


def find_layers(one: OneBatch) -> dict[str, Any]:
    """Return "units" (activation functions, in the order in which they ran), "layers", and the parameters without a gradient.

    inputs: root mean square of what differs between examples in the batch; None without floating tensors.
    units: module, op, units, "dead" (share of ReLU units that are 0 for every example), "saturated" (share of values within 0.01
    of a bound, for sigmoids the smaller of both bounds' shares; for softmax over at least eight keys, of rows with a weight above 0.99).
    layers: module, "signal" (root mean square of what differs between examples), "size" (of all), "gradient" (norm of the
    loss's gradient by what the layer returns).
    """
    names = dict(one.model.named_modules())
    units: list[dict[str, Any]] = []

    def watch(op: str, module: str, out: Tensor) -> None:
        if not isinstance(names.get(module), _RECURRENT):
            seen = _unit(op, out)
            if seen is not None:
                units.append({"module": module, "op": op, **seen})

    one.model.train()
    with torch.no_grad(), autocast(one.stack.device, one.stack.precision):
        flow = trace_dataflow(one.model, lambda: one.workload.forward(one.model, one.batch), one.batch, watch=watch)
    met = {node.name for node in flow.nodes if node.name}
    layers, none = _gradients(one)
    return {
        "inputs": max((_rms(v - v.mean(0)) for v in _inputs(one)), default=None),
        "units": units,
        "layers": layers,
        "not_in_graph": none,
        "not_in_forward": [name for name in none if name not in met],
        "equal": _equal(one),
    }


def _unit(op: str, out: Tensor) -> dict[str, Any] | None:
    if out.dim() < 2 or not out.numel() or not out.is_floating_point():
        return None
    if op in ("relu", "threshold") or (op == "hardtanh" and float(out.min()) >= 0):
        return {"units": _units(out), "dead": _dead(out == 0)}
    if op == "tanh":
        return {"units": _units(out), "saturated": float((out.abs() > 0.99).float().mean())}
    if op == "sigmoid":
        low, high = float((out < 0.01).float().mean()), float((out > 0.99).float().mean())
        return {"units": _units(out), "saturated": low + high, "one_sided": min(low, high)}
    if op == "_softmax" and out.dim() > 2 and out.shape[-1] >= 8:
        return {"units": out.shape[-1], "saturated": float((out.amax(-1) > 0.99).float().mean())}
    return None


def _units(out: Tensor) -> int:
    return out.shape[1] if out.dim() != 3 else out.shape[2]


def _dead(zero: Tensor) -> float:
    """Return the share of units that are zero everywhere; of a tensor with three axes either may be the units."""
    if zero.dim() == 2:
        return float(zero.all(0).float().mean())
    if zero.dim() == 3:
        return min(float(zero.flatten(0, 1).all(0).float().mean()), float(zero.all(2).all(0).float().mean()))
    return float(zero.flatten(2).all(2).all(0).float().mean())


def _gradients(one: OneBatch) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the layers with their gradients, and the trained parameters that the loss does not hang on."""
    seen: list[tuple[str, Tensor]] = []

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
            out = output[0] if isinstance(output, tuple) else output
            if isinstance(out, Tensor) and out.requires_grad and out.is_floating_point() and out.dim() > 1:
                seen.append((name, out))

        return hook

    leaves = [
        (name, m) for name, m in one.model.named_modules() if any(p.dim() > 1 for p in m.parameters(recurse=False))
    ]
    handles = [m.register_forward_hook(keep(name)) for name, m in leaves]
    try:
        one.model.train()
        seed_all(0)
        with buffers_put_back(one.model), autocast(one.stack.device, one.stack.precision):
            outputs = one.workload.forward(one.model, one.taken(torch.arange(one.examples)))
            loss = one.workload.loss(outputs, one.batch).mean()
            tensors = [out for _, out in seen]
            grads = torch.autograd.grad(loss, [*tensors, *one.stack.parameters[0]], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    layers = []
    for (name, out), grad in zip(seen, grads, strict=False):
        values = out.detach().double().flatten(1)
        layers.append({
            "module": name, "size": _rms(values), "signal": _rms(values - values.mean(0)),
            "gradient": None if grad is None else float(grad.double().norm()),
        })  # fmt: skip
    pairs = zip(one.stack.names, grads[len(tensors) :], strict=True)
    return layers, [name for name, grad in pairs if grad is None]


def _inputs(one: OneBatch) -> list[Tensor]:
    return [t.detach().double().reshape(one.examples, -1) for t in one.inputs() if t.is_floating_point()]


def _rms(values: Tensor) -> float:
    found = float(values.square().mean().sqrt())
    return found if math.isfinite(found) else math.inf


def _equal(one: OneBatch) -> list[dict[str, Any]]:
    """Return the weights whose units are all equal: two rows or more of two values or more, each row like the first.

    "zero": all are 0. "product": it is the weight of a layer that multiplies by it, not of a norm.
    """
    owners = dict(one.model.named_modules())
    found = []
    for name, p in zip(one.stack.names, one.stack.parameters[0], strict=True):
        if p.dim() > 1 and p.shape[0] > 1 and p[0].numel() > 1 and bool((p == p[:1]).all()):
            owner = owners[name.rpartition(".")[0]]
            found.append({"name": name, "zero": not bool(p.any()), "product": isinstance(owner, _PRODUCTS)})
    return found
