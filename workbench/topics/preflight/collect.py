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
from workbench.topics.preflight.diagnose import misnumbered, spoilt_splits
from workbench.train.batches import eval_batches, train_batches
from workbench.train.coupled_losses import evaluation_batch
from workbench.train.evaluation import float_tensors
from workbench.train.forward import autocast, explained, per_example
from workbench.train.gradients import LoopGradients
from workbench.train.lane_stack import LaneStack, build_model
from workbench.train.rng import isolated_rng
from workbench.train.update_rules import make_updater
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_data, check_fresh, check_selection
from workbench.workloads.losses import CrossEntropy, TokenCrossEntropy, classes_of, label_of

_NO_STEP: dict[str, Any] = {
    "first_loss": None, "parameters": 0, "tensors": 0, "frozen": [], "no_gradient": [], "no_update": [], "nonfinite_gradient": [],
}  # fmt: skip


def collect_preflight(
    workload: Workload, config: TrainConfig, device: torch.device, *, max_examples: int = 20_000
) -> dict[str, Any]:
    """Return JSON facts for `diagnose_preflight`; the caller's random state is left bit for bit as it was.

    At most `max_examples` of a split are read.

    Raises:
        WorkloadError: nothing can be trained: the data, the model or the loss are broken.
    """
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
    seen = 0
    bad_in: Counter[str] = Counter()
    first_bad: tuple[int, int] | None = None
    losses_seen: list[Tensor] = []
    counts: Tensor | None = None
    classes: int | None = None
    wrong: str | None = None
    stack.models[0].eval()
    with torch.no_grad():
        size = evaluation_batch(workload, config, device)
        for batch, examples in eval_batches(workload, split, size, device, config.precision):
            bad, first = _not_finite(batch, examples, label_of(workload.loss, batch, examples))
            if bad and first_bad is None:
                first_bad = (seen + first[0], seen + first[1])
            bad_in.update(bad)
            where = f"in the batch of the {split} split that begins with example {seen}"
            try:
                with explained(workload, where), autocast(device, config.precision):
                    outputs, losses, weights = per_example(workload, stack.models[0], batch, examples)
            except TargetError as error:
                wrong = str(error).removeprefix(f"workload {workload.name!r}, ")
                losses = torch.full((examples,), math.nan)
            except WorkloadError:
                if not bad:
                    raise
                losses = torch.full((examples,), math.nan)  # the data are to blame
            else:
                classes = classes_of(workload.loss, outputs)
                losses = losses if weights is None else losses[weights > 0]
            losses_seen.append(losses.cpu().double())
            if isinstance(workload.loss, (CrossEntropy, TokenCrossEntropy)) and classes is not None:
                counts = _add_counts(counts, workload.loss.targets(batch), classes)
            seen += examples
            if seen >= max_examples or wrong is not None:
                break
    finite = torch.cat(losses_seen)
    return {
        "read": seen,
        "nonfinite_values": bad_in.total(),
        "nonfinite_in": dict(bad_in),
        "nonfinite_from_example": None if first_bad is None else first_bad[0],
        "nonfinite_to_example": None if first_bad is None else first_bad[1],
        "loss": float(finite.mean()) if finite.isfinite().all() else None,
        "classes": classes,
        "misnumbered": wrong,
        "class_counts": None if counts is None or len(counts) > 1000 else counts.tolist(),
    }


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


def _add_counts(counts: Tensor | None, targets: Any, classes: int) -> Tensor | None:
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return counts
    valid = targets.reshape(-1)
    found = torch.bincount(valid[(valid >= 0) & (valid < classes)].cpu(), minlength=classes)
    return found if counts is None else counts + found


def _first_step(workload: Workload, stack: LaneStack, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Take one step: which parameters get a gradient, and which ones move."""
    stack.models[0].train()
    gradients = LoopGradients(workload, stack)
    with explained(workload, "at the first step"):
        loss = float(gradients([next(train_batches(workload, config, device))]).loss)
    if not math.isfinite(loss):
        return _NO_STEP | {"nonfinite_loss": str(loss)}
    lr = torch.full((1, 1), config.peak_lr, dtype=stack.values.dtype, device=device)
    updater = make_updater([config], stack.values, stack.parameters)
    moved = torch.zeros_like(stack.values, dtype=torch.bool)
    for step in range(2):  # some optimizers hold their first update back
        moved |= updater.update(stack.values, stack.grad, lr, step) != 0
    parts = list(zip(stack.names, stack.slices, strict=True))
    no_gradient = [name for name, where in parts if not bool(stack.grad[0, where].any())]
    no_update = [name for name, where in parts if not bool(moved[0, where].any())]
    return {
        "first_loss": loss,
        "parameters": int(stack.values.numel()),
        "tensors": len(parts),
        "frozen": [name for name, p in stack.models[0].named_parameters() if not p.requires_grad],
        "no_gradient": no_gradient,
        "no_update": no_update,
        "sizes": {name: w.stop - w.start for name, w in parts if name in {*no_gradient, *no_update}},
        "nonfinite_gradient": [name for name, w in parts if not bool(torch.isfinite(stack.grad[0, w]).all())],
    }
