"""What is asked of a model with one batch: units and gradients layer by layer, modes, and what reaches the outputs of an example."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from workbench.instruments.losses.graphs import roots_of, walked
from workbench.instruments.losses.layers import RECURRENT, as_numbers, in_a_row, layers_of, signals
from workbench.instruments.losses.units import at_bounds, equal_weights, off_for_all, unit_count
from workbench.topics.architecture.dataflow import trace_dataflow
from workbench.topics.one_batch.batch import OneBatch
from workbench.train.forward import autocast

MOST_SLICES, PASSES = 64, 6
FEWEST = 4  # positions of a sequence of tokens (rule of thumb)
AGREE = 0.95  # share of the targets that are the input `offset` places further on (rule of thumb: masked positions agree in fewer)
_MASKS = frozenset({"bernoulli", "native_dropout", "_fused_dropout", "alpha_dropout", "feature_dropout"})
_DRAWS = ("normal", "rand", "uniform", "exponential", "multinomial", "poisson", "cauchy", "log_normal", "geometric")


def _rms(values: Tensor) -> float:
    """Return the root mean square; infinite where values are not finite."""
    found = float(values.square().mean().sqrt())
    return found if math.isfinite(found) else math.inf


def find_layers(one: OneBatch) -> dict[str, Any]:
    """Return "units" (activation functions, in the order in which they ran), "layers", and the parameters without a gradient.

    One forward and backward pass in training mode.
    units: module, op, units, "dead" (share of ReLU units that are 0 for every example), "saturated" (share of values within 0.01
    of a bound, for sigmoids the smaller of both bounds' shares; for softmax over at least eight keys, of rows with a weight above 0.99).
    layers: see `signals`; in_a_row: see `in_a_row`; dropped: the highest rate of a dropout, and its module.
    equal: weights whose units are all equal: two rows or more of two values or more, each row like the first; "zero": all are 0,
    "product": it is the weight of a layer that multiplies by it, not of a norm.
    """
    modules, units = dict(one.model.named_modules()), list[dict[str, Any]]()

    def watch(op: str, module: str, out: Tensor) -> None:
        if not isinstance(modules.get(module), RECURRENT) and (seen := _unit(op, out)) is not None:
            units.append({"module": module, "op": op, **seen})

    one.model.train()
    with torch.no_grad(), autocast(one.stack.device, one.stack.precision):
        flow = trace_dataflow(one.model, lambda: one.workload.forward(one.model, one.batch), one.batch, watch=watch)
    named = zip(one.stack.names, one.stack.parameters[0], strict=True)
    weights = [(name, modules[name.rpartition(".")[0]], p) for name, p in named]
    met = {node.name for node in flow.nodes if node.name}
    layers, none, in_row = _gradients(one, modules)
    return {
        "units": units, "layers": layers, "in_a_row": in_row,
        "dropped": max(((m.p, name) for name, m in modules.items() if isinstance(m, nn.modules.dropout._DropoutNd)), default=(0.0, "")),
        "not_in_graph": none, "not_in_forward": [name for name in none if name not in met],
        "equal": [row | {"zero": bool(zero)} for row, alike, zero in equal_weights(weights) if bool(alike)],
    }  # fmt: skip


def _unit(op: str, out: Tensor) -> dict[str, Any] | None:
    if out.dim() < 2 or not out.numel() or not out.is_floating_point():
        return None
    found = {name: float(share) for name, share in at_bounds(op, out).items()}
    if off := off_for_all(op, out):
        found["dead"] = min(float(each.float().mean()) for each in off)
    return {"units": unit_count(out), **found} if found else None


def _gradients(one: OneBatch, modules: dict[str, nn.Module]) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Return the layers with their gradients, the trained parameters that the loss does not hang on, and the layers that one would do for."""
    with one.evaluated(train=True):
        outputs = one.workload.forward(one.model, one.taken(torch.arange(one.examples)))
        loss = one.workload.loss(outputs, one.batch).mean()
        leaves, nodes = walked(roots_of(loss))
        owners = {id(p): (name, m) for name, m in modules.items() for p in m.parameters(recurse=False)}
        layers, there = layers_of(nodes, owners), {id(leaf) for leaf in leaves}
        found = as_numbers(signals(loss, layers)), in_a_row(loss, nodes, layers, [one.model])
    named = zip(one.stack.names, one.stack.parameters[0], strict=True)
    return found[0], [name for name, p in named if id(p) not in there], found[1]


def find_modes(one: OneBatch) -> dict[str, Any]:
    """Return the modules that act differently in training and are in the wrong mode, and what is random in evaluation.

    "train_in_eval" and "eval_in_train" map a module's name to "dropout", "batch_norm" or "frozen" (batch norm whose running
    statistics were set, or a part of the model that is not trained). "change": how far outputs differ between two seeds over
    their spread; "masks" and "draws": the modules of the random operations that made them. "batch_statistics": batch norm without running ones.
    """
    modules = dict(one.model.named_modules())
    kinds = {name: kind for name, m in modules.items() if (kind := _acts_by_mode(m))}
    first = one.flat(one.forward())
    left = {name: kind for name, kind in kinds.items() if modules[name].training}
    second = one.flat(one.forward(seed=1))
    some = bool(first.numel())
    apart = _rms(first - second) if some and first.shape == second.shape else 0.0
    norms = [name for name, m in modules.items() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None]  # fmt: skip
    size = _rms(first - first.mean(0)) if some else 0.0
    found: dict[str, Any] = {"train_in_eval": left, "change": apart, "size": size}
    found |= {"masks": [], "draws": [], "batch_statistics": norms}
    if apart > 0:
        one.model.eval()
        with torch.no_grad():
            flow = trace_dataflow(one.model, lambda: one.workload.forward(one.model, one.batch), one.batch)
        for node in flow.nodes:
            if node.op in _MASKS or node.op.startswith(_DRAWS):
                found["masks" if node.op in _MASKS else "draws"].append(node.module)
    one.forward(train=True)
    frozen = set[nn.Module]()
    for m in modules.values():
        if list(m.parameters()) and not any(p.requires_grad for p in m.parameters()):
            frozen |= set(m.modules())
    found["eval_in_train"] = {
        name: "frozen" if modules[name] in frozen or (kind == "batch_norm" and _was_set(modules[name])) else kind
        for name, kind in kinds.items()
        if not modules[name].training
    }
    return found


def _acts_by_mode(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "batch_norm" if module.track_running_stats else None
    drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    drops |= isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
    drops |= isinstance(module, nn.MultiheadAttention) and module.dropout > 0
    return "dropout" if drops else None


def _was_set(module: nn.Module) -> bool:
    """Whether running statistics are others than those that a fresh layer has."""
    mean, var = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    return mean is not None and var is not None and (bool(mean.any()) or bool((var != 1).any()))


def find_spread(one: OneBatch) -> dict[str, Any]:
    """Return "outputs" (values an example), their root mean square "size", "mean", "spread" between examples, and "inputs_vary"."""
    values = one.flat(one.forward())
    some = bool(values.numel())
    return {
        "outputs": values.shape[1], "size": _rms(values) if some else None, "mean": float(values.mean()) if some else None,
        "spread": _rms(values - values.mean(0)) if some else None,
        "inputs_vary": any(bool((t != t[:1]).any()) for t in one.inputs()),
    }  # fmt: skip


def find_coupling(one: OneBatch) -> dict[str, Any]:
    """Return how far the outputs of an example move in evaluation mode when the others are exchanged, over what they move by its own."""
    half = one.examples // 2
    if half < 1 or not one.exchangeable or one.pairs:
        return {"ratio": None}
    outputs = one.forward()
    tensors = one.tensors(outputs)
    if len(tensors) == 1 and torch.equal(tensors[0].double().reshape(-1), one.losses(outputs)):
        return {"ratio": None}
    a, b = torch.arange(half), torch.arange(half, 2 * half)
    whole = one.rows(torch.cat([a, b]))
    there, first, last = (whole.flat(one.rows(torch.cat(order)).forward()) for order in ((a, b), (a, a), (b, b)))
    if not there.numel() or not there.shape == first.shape == last.shape:
        return {"ratio": None}
    other = _rms(torch.cat([first[:half] - there[:half], last[half:] - there[half:]]))
    own = _rms(torch.cat([first[half:] - there[half:], last[:half] - there[:half]]))
    return {"own": own, "other": other, "ratio": other / own if own > 0 else None}


def find_unused(one: OneBatch) -> list[dict[str, Any]]:
    """Return for each tensor of inputs, and each of its axes, which of its slices never reach the outputs, in evaluation mode.

    In each pass every example gets another one of its slices from another example; what never made a difference is tried
    again, together and then by halves. Slices that never vary are left out, and so are places in time where a recurrent
    layer forgets them.
    """
    recurrent = any(isinstance(m, RECURRENT) for m in one.model.modules())
    generator = torch.Generator().manual_seed(0)
    there = one.flat(one.forward())
    found = []
    for place, tensor in enumerate(one.inputs()):
        for axis in range(1, tensor.dim()):
            in_time = (tensor.dim() == 2 and not tensor.is_floating_point()) or (tensor.dim() == 3 and axis == 1)
            if tensor.shape[axis] < 2 or (recurrent and in_time):
                continue
            looked, unused = _slices(one, tensor, axis, there, generator)
            if looked > len(unused):  # else it is no input, but a target or an index
                shape = list(tensor.shape[1:])
                found.append({"tensor": place, "shape": shape, "axis": axis, "looked": looked, "unused": unused})
    return found


def _slices(
    one: OneBatch, tensor: Tensor, axis: int, there: Tensor, generator: torch.Generator
) -> tuple[int, list[int]]:
    """Return how many slices along an axis were looked at, and which of them never made a difference."""
    n, across = one.examples, tensor.movedim(axis, 1).reshape(one.examples, tensor.shape[axis], -1)
    shape = [n, *(tensor.shape[axis] if i == axis else 1 for i in range(1, tensor.dim()))]
    varies = (across != across[:1]).any(0).any(-1).nonzero().flatten().cpu()
    looked = varies[torch.randperm(len(varies), generator=generator)[:MOST_SLICES]]
    if not len(looked):
        return 0, []

    def moved(rows: Any, columns: Tensor, shift: int) -> Tensor:
        """Return which examples' outputs differ when these slices of them come from the example `shift` before."""
        mask = torch.zeros(n, tensor.shape[axis], dtype=torch.bool)
        mask[rows, columns] = True
        given = mask.reshape(shape).to(tensor.device)
        values = one.flat(one.forward(one.changed(lambda t: torch.where(given, t.roll(shift, 0), t), only=tensor)))
        return torch.ones(n, dtype=torch.bool) if values.shape != there.shape else (values != there).any(1).cpu()

    reached = torch.zeros(len(looked), dtype=torch.bool)
    for number in range(PASSES):
        which = (torch.arange(n) + number * 7) % len(looked)
        reached[which[moved(torch.arange(n), looked[which], number + 1)]] = True
    todo, unused = [looked[~reached]], list[int]()
    while todo:
        few = todo.pop()
        if len(few) and not moved(slice(None), few, 1).any():
            unused += few.tolist()
        elif len(few) > 1:
            todo += [few[: len(few) // 2], few[len(few) // 2 :]]
    return len(looked), sorted(unused)


def find_answer(one: OneBatch) -> dict[str, Any] | None:
    """Return where the targets of token sequences stand in the inputs, and whether outputs depend on them; None without such targets.

    "offset": places from a position to its target in the inputs, 1 for a language model, 0 where nothing was shifted; "agree": share
    of targets that stand there; "sees": whether outputs up to a position change with inputs at the target's place. In evaluation mode.
    """
    tokens = [t for t in one.inputs() if t.dim() == 2 and not t.is_floating_point() and t.shape[1] >= FEWEST]
    outputs = _by_position(one, None)
    if outputs is None:
        return None
    for given, target in itertools.permutations(tokens, 2):
        for offset in (0, 1) if target.shape == given.shape else ():
            agree = _agreement(given, target, offset)
            if agree >= AGREE and (sees := _depends(one, given, outputs, offset)) is not None:
                return {"offset": offset, "agree": agree, "sees": sees}
    return None


def _agreement(given: Tensor, target: Tensor, offset: int) -> float:
    """Return the share of targets, ignored ones (below 0) left out, that are the input so many places further on."""
    wanted, there = target[:, : target.shape[1] - offset], given[:, offset:]
    counted = wanted >= 0
    if not counted.any() or bool((wanted == wanted[:1, :1]).all()):
        return 0.0
    return float((wanted == there)[counted].float().mean())


def _by_position(one: OneBatch, batch: Any) -> Tensor | None:
    """Return the outputs that have a row for each position, shape (examples, positions, values)."""
    found = [t for t in one.tensors(one.forward(batch)) if t.dim() == 3]
    return found[0].detach() if len(found) == 1 else None


def _depends(one: OneBatch, given: Tensor, outputs: Tensor, offset: int) -> bool | None:
    """Tell whether outputs before the middle change where inputs from the target's place on come from another example."""
    middle = given.shape[1] // 2
    late = torch.arange(given.shape[1], device=given.device) >= middle
    moved = _by_position(one, one.changed(lambda t: torch.where(late, t.roll(1, 0), t), only=given))
    if moved is None or moved.shape != outputs.shape or outputs.shape[1] < given.shape[1] - 1:
        return None
    seen = slice(middle, None) if offset == 0 else slice(0, middle)
    return bool((moved - outputs)[:, seen].abs().max() > 1e-5 * outputs.abs().max())
