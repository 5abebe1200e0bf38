"""Facts about a model before it trains, by forward passes: the scale of its learning rates, and the loss of guessing."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from workbench.config import TrainConfig
from workbench.train.batches import train_batches
from workbench.train.forward import autocast, per_example
from workbench.train.gradients import LoopGradients, needs_gradient
from workbench.train.optimizers import make_updater
from workbench.train.rng import isolated_rng, seed_all
from workbench.train.stacked_weights import LaneStack, build_model
from workbench.workloads.base import Workload
from workbench.workloads.losses import CrossEntropy, TokenCrossEntropy, classes_of

Weighted = tuple[Any, int, Tensor | None]  # A batch, its number of examples and their weights


class CriticalLR(NamedTuple):
    """The largest lr tried that still lowered the loss along the first update, and the smallest that raised it; 0 and inf for none."""

    below: float
    above: float
    forwards: int

    @property
    def value(self) -> float | None:
        """The geometric middle of the bracket, None where there is no bracket."""
        return math.sqrt(self.below * self.above) if self.below > 0 and math.isfinite(self.above) else None


def measure_critical_lr(
    workload: Workload,
    config: TrainConfig,
    device: torch.device,
    *,
    factor: float = 4.0,
    tolerance: float = 1.1,
    decades: float = 12.0,
    bounded: float = 100.0,
) -> CriticalLR:
    """Bracket the critical lr of a fresh model on its first batch; the caller's random state is left bit for bit as it was.

    Starts at 2 |loss| / (g.u), where a parabola with its minimum at 0 would be back at its start, multiplies or
    divides by `factor` per forward pass until the loss is bracketed, at most `decades` away, then halves the bracket until it is
    narrower than `tolerance`. Only the update's direction is the config's. Where the loss is still below its start `bounded` times further
    away, though not as low as it was, it has an upper bound, as behind a sigmoid: then the bracket is that of a parabola with its minimum
    where this loss is lowest, which is known to a factor of `factor` (both rules of thumb).
    """
    config = config.replace(warmup_steps=0, schedule="constant")
    with isolated_rng():
        stack = LaneStack(workload, [config], device)
        stack.models[0].train()
        batches = next(train_batches(workload, config, device))
        start = float(LoopGradients(workload, stack)([batches]).loss)
        origin = stack.values.clone()
        lr = torch.full((1, 1), config.peak_lr, dtype=origin.dtype, device=device)
        updater = make_updater([config], stack.values, stack.parameters, stack.models)
        direction = updater.update(stack.values, stack.grad, lr, 0) / config.peak_lr
        slope = float((stack.grad * direction).sum())
        if not math.isfinite(slope) or slope <= 0 or not math.isfinite(start):
            return CriticalLR(0.0, math.inf, 0)

        def loss_at(step: float) -> float:
            stack.values.copy_(origin - step * direction)
            total = weight = 0.0
            with torch.no_grad(), isolated_rng():
                for batch, examples in batches:
                    with autocast(device, config.precision):
                        _, losses, weights = per_example(workload, stack.models[0], batch, examples)
                    weights = torch.ones_like(losses) if weights is None else weights
                    total, weight = total + float((weights * losses).sum()), weight + float(weights.sum())
            return total / weight

        def raises(step: float) -> bool:
            return not loss_at(step) < start

        first = 2 * abs(start) / slope if start else 1.0
        tries, forwards = math.ceil(decades * math.log(10) / math.log(factor)), 1
        low, high = (0.0, first) if raises(first) else (first, math.inf)
        while (low == 0.0 or math.isinf(high)) and forwards <= tries:
            probe = high / factor if low == 0.0 else low * factor
            low, high = (low, probe) if raises(probe) else (probe, high)
            forwards += 1
        if low > bounded * first:
            lowest, loss = first, loss_at(first)
            while lowest > low / 10**decades and (smaller := loss_at(lowest / factor)) < loss:
                lowest, loss, forwards = lowest / factor, smaller, forwards + 1
            if loss < loss_at(low):
                return CriticalLR(lowest, factor * lowest, forwards)
        while low > 0.0 and math.isfinite(high) and high / low > tolerance:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if raises(middle) else (middle, high)
            forwards += 1
        return CriticalLR(low, high, forwards)


def measure_chance(
    workload: Workload,
    config: TrainConfig,
    device: torch.device,
    *,
    max_examples: int = 8_192,
    max_bytes: int = 64 * 2**20,
    max_outputs: int = 100_000,
) -> float | None:
    """Return the mean loss of the best output that is the same for every training example; None where there is none.

    For the cross-entropies it is the entropy of the class or token frequencies. For any other loss a constant is fitted for each
    output tensor, as logits where the model ends in a softmax or a log-softmax. A loss that the fit drives without end has
    no such level, nor one that is the same for every example. The caller's random state is left as it was.

    The first `max_examples` of the first epoch are looked at (rule of thumb: a variance to 2 %), so many bytes of
    batches held while a constant is fitted, and larger outputs than `max_outputs` values are not fitted.
    """
    needs_gradient(workload)
    with isolated_rng():
        model = build_model(workload, config, device).eval()
        seed_all(config.shared_seed, config.per_host_seed)
        whole = min(max_examples, len(workload.train_data)) // (config.batch_size // config.accumulate_steps)
        pairs = (pair for step in train_batches(workload, config, device) for pair in step)
        stream = itertools.islice(pairs, max(1, whole))
        first, examples = next(stream)
        with autocast(device, config.precision):
            outputs, _, _ = per_example(workload, model, first, examples)
        weights = workload.weights
        weighted: Iterable[Weighted] = (
            (batch, count, None if weights is None else weights(batch).detach())
            for batch, count in itertools.chain([(first, examples)], stream)
        )
        classes = classes_of(workload.loss, outputs)
        if classes is not None and isinstance(workload.loss, (CrossEntropy, TokenCrossEntropy)):
            return _entropy(workload.loss, weighted, classes, sampled=len(workload.train_data) > max_examples)
        leaves = tree_leaves(outputs)
        if not leaves or not all(
            isinstance(t, Tensor) and t.requires_grad and t.is_floating_point() and t.dim() for t in leaves
        ):
            return None  # what no parameter makes, such as a mask, is no output that could be constant
        apart = not isinstance(outputs, Tensor) and any(len(t) != examples for t in leaves)
        if apart or sum(t[0].numel() for t in leaves) > max_outputs:
            return None
        size = sum(leaf.nbytes for leaf in tree_leaves(first) if isinstance(leaf, Tensor)) or 1
        return _fitted(workload, outputs, list(itertools.islice(weighted, max(1, max_bytes // size))))


def _entropy(
    loss: CrossEntropy | TokenCrossEntropy, batches: Iterable[Weighted], classes: int, *, sampled: bool
) -> float | None:
    """Return the entropy of the targets' frequencies; of a sample with its bias taken out (Miller and Madow, 1955)."""
    counts, seen = torch.zeros(classes, dtype=torch.float64), 0
    for batch, _, weights in batches:
        targets = loss.targets(batch).reshape(-1).long().cpu()
        each = torch.ones(targets.shape, dtype=torch.float64)
        if weights is not None and isinstance(loss, CrossEntropy):  # tokens weigh alike: their number is the weight
            each = weights.double().cpu()
        known = (targets >= 0) & (targets < classes)
        if isinstance(loss, TokenCrossEntropy) and loss.ignore_index is not None:
            known &= targets != loss.ignore_index
        counts.scatter_add_(0, targets[known], each[known])
        seen += int(known.sum())
    shares = counts[counts > 0] / counts.sum()
    if len(shares) < 2:
        return None
    bias = (len(shares) - 1) / (2 * seen) if sampled else 0.0
    return min(float(-(shares * shares.log()).sum()) + bias, math.log(classes))


def _fitted(
    workload: Workload, outputs: Any, batches: Sequence[Weighted], *, searches: int = 4, tolerance: float = 1e-3
) -> float | None:
    """Return the loss of the best constant output; None where it has no minimum.

    At one the last search finds at most the share `tolerance` of the gain, and the slope is below a tenth of the first (rules of thumb).
    """
    leaves, form = tree_flatten(outputs)
    constants, shapes = zip(*(_parametrised(leaf.detach()) for leaf in leaves), strict=True)

    def losses_of(values: Sequence[Tensor], batch: Any, examples: int) -> Tensor:
        shaped = [shape(value) for shape, value in zip(shapes, values, strict=True)]
        return workload.loss(tree_unflatten([value.expand(examples, *value.shape) for value in shaped], form), batch)

    moved = [constant.detach() + torch.randn_like(constant) for constant in constants]
    if not _compares(losses_of, [moved, constants], batches[0]):
        return None
    optimizer = torch.optim.LBFGS(constants, max_iter=30, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total, weight = torch.zeros((), dtype=torch.float64, device=leaves[0].device), 0.0
        for batch, examples, weights in batches:
            losses = losses_of(constants, batch, examples).double()
            each = torch.ones_like(losses) if weights is None else weights.double()
            total, weight = total + (each * losses).sum(), weight + float(each.sum())
        (total / weight).backward()  # type: ignore[no-untyped-call]
        return (total / weight).detach()

    found, slopes = [float(closure())], [_length(constants)]
    for _ in range(searches):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        found.append(float(closure()))
        slopes.append(_length(constants))
        gained, rounding = found[0] - found[-1], 1e-6 * abs(found[-1])
        if settled := found[-2] - found[-1] <= max(tolerance * gained, rounding):
            break
    flat = slopes[-1] <= 0.1 * slopes[0] or gained <= rounding
    return min(found) if math.isfinite(found[-1]) and flat and settled else None


def _length(constants: Sequence[Tensor]) -> float:
    """Return the length of the gradient; infinite without any."""
    gradients = [constant.grad.flatten() for constant in constants if constant.grad is not None]
    return float(torch.linalg.vector_norm(torch.cat(gradients))) if gradients else math.inf


def _compares(
    losses_of: Callable[[Sequence[Tensor], Any, int], Tensor], tries: Sequence[Sequence[Tensor]], weighted: Weighted
) -> bool:
    """Tell whether the loss of one and the same output differs between examples: else it is held against nothing in the batch."""
    batch, examples, _ = weighted
    for values in tries:
        try:
            losses = losses_of(values, batch, examples).detach()
        except (RuntimeError, ValueError):
            if values is tries[-1]:
                raise
            continue
        return losses.dim() > 0 and bool((losses - losses[0]).abs().max() > 1e-6 * losses.abs().max())
    return False


def _parametrised(outputs: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return what to fit, starting at the mean output, and the function that makes an output of it."""
    mean = outputs.float().mean(0)
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        ones = torch.ones(())
        if bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), ones.to(outputs), atol=1e-3):
            return mean.clamp(min=1e-6).log().requires_grad_(), lambda value: value.softmax(0)
        if torch.allclose(outputs.logsumexp(1), ones.to(outputs) * 0, atol=1e-3):
            return mean.clone().requires_grad_(), lambda value: value.log_softmax(0)
    return mean.clone().requires_grad_(), lambda value: value
