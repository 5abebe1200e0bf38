"""Facts about a workload before any training: data, loss, gradient and first update on every parameter."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from workbench.config import TrainConfig
from workbench.errors import TargetError, WorkloadError
from workbench.topics.one_batch.diagnose_preflight import misnumbered, spoilt_splits
from workbench.train.batches import eval_batches, train_batches
from workbench.train.example_values import evaluation_batch, float_tensors
from workbench.train.forward import autocast, explained, per_example
from workbench.train.gradients import LoopGradients
from workbench.train.optimizers import make_updater
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import LaneStack, build_model
from workbench.train.steps.own_step import first_update
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_data, check_fresh, check_selection
from workbench.workloads.losses import CrossEntropy, TokenCrossEntropy, classes_of, label_of

_NO_STEP: dict[str, Any] = {
    "first_loss": None, "parameters": 0, "tensors": 0, "frozen": [], "no_gradient": [], "no_update": [], "nonfinite_gradient": [],
}  # fmt: skip

_ROUNDING = 1e-4
"""Share of the model's largest gradient up to which that of a tensor is taken for rounding, as of a bias before batch norm, where it is
up to 4e-6 (rule of thumb): an update as small is rounded away, whatever the optimizer."""


def collect_preflight(
    workload: Workload, config: TrainConfig, device: torch.device, *, max_examples: int = 20_000
) -> dict[str, Any]:
    """Return JSON facts for `diagnose_preflight`; the caller's random state is left bit for bit as it was."""
    sizes = check_data(workload, config)
    check_selection(workload, config)
    if sizes["train"] < 2:
        raise WorkloadError(
            f"workload {workload.name!r}: train_data has 1 example; a diagnosis needs at least 2, because nothing can be said "
            "about noise or about validation from one. Repeat it if a single example is what you mean to fit."
        )
    with isolated_rng():
        stack = LaneStack(workload, [config], device)
        check_fresh(stack.models[0], build_model(workload, config, device))
        facts: dict[str, Any] = {"examples": sizes}
        for split in ("train", "validation"):
            facts[split] = _scan(workload, stack, split, config=config, device=device, max_examples=max_examples)
        if spoilt_splits(facts) or misnumbered(facts):
            return facts | _NO_STEP  # nobody trains on that
        return facts | _first_step(workload, stack, config, device)


def _scan(
    workload: Workload, stack: LaneStack, split: str, *, config: TrainConfig, device: torch.device, max_examples: int
) -> dict[str, Any]:
    """Read a split once: non-finite values, losses of the untrained model, classes."""
    seen, bad_in = 0, Counter[str]()
    first_bad: tuple[int | None, int | None] = (None, None)
    losses_seen: list[Tensor] = []
    counts: Tensor | None = None
    classes: int | None = None
    wrong: str | None = None
    stack.models[0].eval()
    size = evaluation_batch(workload, config, device)
    with torch.no_grad():
        for batch, examples in eval_batches(workload, split, size, device, config.precision):
            bad, first = _not_finite(batch, examples, label_of(workload.loss, batch, examples))
            if bad and not bad_in:
                first_bad = (seen + first[0], seen + first[1])
            bad_in.update(bad)
            losses = torch.full((examples,), math.nan)
            try:
                where = f"in the batch of the {split} split that begins with example {seen}"
                with explained(workload, where), autocast(device, config.precision):
                    outputs, losses, weights = per_example(workload, stack.models[0], batch, examples)
                classes = classes_of(workload.loss, outputs)
                losses = losses if weights is None else losses[weights > 0]
            except TargetError as error:
                wrong = str(error).removeprefix(f"workload {workload.name!r}, ")
            except WorkloadError:
                if not bad:  # else the data are to blame
                    raise
            losses_seen.append(losses.cpu().double().reshape(-1))
            if isinstance(workload.loss, (CrossEntropy, TokenCrossEntropy)) and classes is not None:
                targets = workload.loss.targets(batch)
                if isinstance(targets, Tensor) and not targets.is_floating_point():
                    valid = targets[(targets >= 0) & (targets < classes)].cpu()
                    counts = torch.bincount(valid, minlength=classes) + (0 if counts is None else counts)
            seen += examples
            if seen >= max_examples or wrong is not None:
                break
    finite = torch.cat(losses_seen)
    return {
        "read": seen, "nonfinite_values": bad_in.total(), "nonfinite_in": dict(bad_in),
        "nonfinite_from_example": first_bad[0], "nonfinite_to_example": first_bad[1],
        "loss": float(finite.mean()) if finite.isfinite().all() else None, "classes": classes, "misnumbered": wrong,
        "class_counts": None if counts is None or len(counts) > 1000 else counts.tolist(),
    }  # fmt: skip


def _not_finite(batch: Any, examples: int, labels: Tensor | None) -> tuple[dict[str, int], tuple[int, int]]:
    """Return how many values are not finite in which part of a batch, and between which two examples of it the first one lies."""
    bad, first = dict[str, int](), (examples, examples - 1)
    pair = isinstance(batch, (list, tuple)) and len(batch) == 2
    for path, leaf in tree_flatten_with_path(batch)[0]:
        wrong = [~torch.isfinite(t) for t in float_tensors(leaf)]
        if not any(bool(w.any()) for w in wrong):
            continue
        place = keystr(path)
        is_target = labels is not None and leaf.data_ptr() == labels.data_ptr()
        where = "targets" if is_target else "inputs" if pair and place == "[0]" else f"batch{place}"
        bad[where] = bad.get(where, 0) + sum(int(w.sum()) for w in wrong)
        low, high = 0, examples - 1
        if leaf.dim() and len(leaf) == examples:
            low = high = int(wrong[0].reshape(examples, -1).any(1).nonzero()[0])
        first = (min(first[0], low), min(first[1], high))
    return bad, first


def _first_step(workload: Workload, stack: LaneStack, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Take one step: which parameters get a gradient, and which ones move."""
    stack.models[0].train()
    batches = next(train_batches(workload, config, device))
    moved = torch.zeros_like(stack.values, dtype=torch.bool)
    with explained(workload, "at the first step"):
        if workload.step is not None:
            loss, after = first_update(workload, stack, config, batches)
            moved |= after != stack.values
        else:
            loss = float(LoopGradients(workload, stack)([batches]).loss)
    if not math.isfinite(loss):
        return _NO_STEP | {"nonfinite_loss": str(loss)}
    lr = torch.full((1, 1), config.peak_lr, dtype=stack.values.dtype, device=device)
    if workload.step is None:
        updater = make_updater([config], stack.values, stack.parameters, stack.models)
        for step in range(2):  # some optimizers hold their first update back
            moved |= updater.update(stack.values, stack.grad, lr, step) != 0
    parts = list(zip(stack.names, stack.slices, strict=True))
    sizes = stack.grad[0].abs()
    still = {
        "no_gradient": [name for name, where in parts if not bool(sizes[where].any())],
        "no_update": [n for n, where in parts if not bool(moved[0, where].any()) and bool((sizes[where] > _ROUNDING * sizes.max()).any())],
    }  # fmt: skip
    named = {*still["no_gradient"], *still["no_update"]}
    return {
        "first_loss": loss, "parameters": int(stack.values.numel()), "tensors": len(parts), **still,
        "frozen": [name for name, p in stack.models[0].named_parameters() if not p.requires_grad],
        "sizes": {name: where.stop - where.start for name, where in parts if name in named},
        "nonfinite_gradient": [name for name, where in parts if not bool(torch.isfinite(stack.grad[0, where]).all())],
    }  # fmt: skip
