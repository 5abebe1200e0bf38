"""One round of a study: trials that do not depend on each other, asked for together so that they train side by side."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.config import TrainConfig
from workbench.record.read import TrialRecord
from workbench.record.roles import Role
from workbench.studies.session import Session
from workbench.train.batches import train_batches
from workbench.train.forward import autocast, per_example
from workbench.train.lane_stack import build_model
from workbench.train.lanes.memory import check_lanes
from workbench.train.rng import isolated_rng, seed_all
from workbench.workloads.base import Workload
from workbench.workloads.losses import CrossEntropy, TokenCrossEntropy, classes_of

__all__ = ["Asked", "run_round"]


Weighted = tuple[Any, int, Tensor | None]


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

    For the cross-entropies it is the entropy of the class or token frequencies, for a squared error the variance of the
    targets. For any other loss of one output tensor the constant is fitted, as logits where the model ends in a softmax or a
    log-softmax. A loss that the fit drives without end has no such level, nor one that is the same for every example. The
    caller's random state is left as it was.

    Args:
        workload: what is trained.
        config: decides the batches.
        device: where.
        max_examples: examples that are looked at, the first of the first epoch (rule of thumb: a variance to 2 %).
        max_bytes: of batches that are held while a constant is fitted.
        max_outputs: values of one output; larger ones are not fitted.
    """
    with isolated_rng():
        model = build_model(workload, config, device).eval()
        seed_all(config.shared_seed, config.per_host_seed)
        whole = min(max_examples, len(workload.train_data)) // (config.batch_size // config.accumulate_steps)
        pairs = (pair for step in train_batches(workload, config, device) for pair in step)
        stream = itertools.islice(pairs, max(1, whole))
        first, examples = next(stream)
        with torch.no_grad(), autocast(device, config.precision):
            outputs, _, _ = per_example(workload, model, first, examples)
        weighted = (_weighted(workload, *pair) for pair in itertools.chain([(first, examples)], stream))
        classes = classes_of(workload.loss, outputs)
        if classes is not None and isinstance(workload.loss, (CrossEntropy, TokenCrossEntropy)):
            return _entropy(workload.loss, weighted, classes, sampled=len(workload.train_data) > max_examples)
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or outputs[0].numel() > max_outputs:
            return None
        return _fitted(workload, outputs, list(itertools.islice(weighted, max(1, max_bytes // (_bytes(first) or 1)))))


def _weighted(workload: Workload, batch: Any, examples: int) -> Weighted:
    return batch, examples, None if workload.weights is None else workload.weights(batch).detach()


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


def _bytes(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.numel() * batch.element_size()
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return sum(_bytes(part) for part in parts)


def _fitted(
    workload: Workload, outputs: Tensor, batches: Sequence[Weighted], *, searches: int = 2, tolerance: float = 1e-3
) -> float | None:
    """Return the loss of the best constant output; None where it has no minimum.

    At a minimum the last search finds no more than the share `tolerance` of the gain, and the slope is below a tenth of what it
    was at the start (rules of thumb).
    """
    constant, shaped = _parametrised(outputs)
    if not _compares(workload, [shaped(constant.detach() + torch.randn_like(constant)), outputs[0]], batches[0]):
        return None
    optimizer = torch.optim.LBFGS([constant], max_iter=30, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total, weight = torch.zeros((), dtype=torch.float64, device=outputs.device), 0.0
        for batch, examples, weights in batches:
            losses = workload.loss(shaped(constant).expand(examples, *constant.shape), batch).double()
            each = torch.ones_like(losses) if weights is None else weights.double()
            total, weight = total + (each * losses).sum(), weight + float(each.sum())
        (total / weight).backward()  # type: ignore[no-untyped-call]
        return (total / weight).detach()

    found, slopes = [], []
    for search in range(searches + 1):
        if search:
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        found.append(float(closure()))
        slopes.append(float(torch.linalg.vector_norm(constant.grad)) if constant.grad is not None else math.inf)
    gained, rounding = found[0] - found[-1], 1e-6 * abs(found[-1])
    flat = slopes[-1] <= 0.1 * slopes[0] or gained <= rounding
    settled = found[-2] - found[-1] <= max(tolerance * gained, rounding)
    return min(found) if math.isfinite(found[-1]) and flat and settled else None


def _compares(workload: Workload, constants: Sequence[Tensor], weighted: Weighted) -> bool:
    """Tell whether the loss of one and the same output differs between examples: else it is held against nothing in the batch.

    Args:
        workload: what is trained.
        constants: outputs to try, in order; a loss may refuse one that no model makes.
        weighted: a batch.
    """
    batch, examples, _ = weighted
    for constant in constants[:-1]:
        with contextlib.suppress(RuntimeError, ValueError):
            return _differs(workload.loss(constant.expand(examples, *constant.shape), batch))
    return _differs(workload.loss(constants[-1].expand(examples, *constants[-1].shape), batch))


def _differs(losses: Tensor) -> bool:
    return bool((losses - losses[0]).abs().max() > 1e-6 * losses.abs().max())


def _parametrised(outputs: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return what to fit, starting at the mean output, and the function that makes an output of it.

    Where the outputs along an axis are probabilities or their logarithms, so is the constant.
    """
    mean = outputs.float().mean(0)
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        ones = torch.ones(())
        if bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), ones.to(outputs), atol=1e-3):
            return mean.clamp(min=1e-6).log().requires_grad_(), lambda value: value.softmax(0)
        if torch.allclose(outputs.logsumexp(1), ones.to(outputs) * 0, atol=1e-3):
            return mean.clone().requires_grad_(), lambda value: value.log_softmax(0)
    return mean.clone().requires_grad_(), lambda value: value


class Asked(NamedTuple):
    """A trial that a round asks for, and what for."""

    stage: Role
    config: TrainConfig


def run_round(session: Session, asked: Sequence[Asked]) -> list[TrialRecord]:
    """Run the trials of one round and return their records in the order asked; the same trial twice is one.

    Args:
        session: the study.
        asked: its trials; they may be of different stages and lengths.

    Raises:
        WorkbenchError: one cannot be trained; it is named, and nothing is written.
    """
    unique: dict[TrainConfig, str] = {}
    for trial in asked:
        unique.setdefault(trial.config, trial.stage)
    if not unique:
        return []
    session.collect("chance_loss", lambda: measure_chance(session.workload, session.config, session.device))
    sizes = check_lanes(session.workload, list(unique))
    mixed = len(set(unique.values())) > 1
    for config, stage in unique.items() if mixed else ():  # a trial keeps the stage that it was first written down with
        session.writer.trial(config.to_dict(), stage=stage, train_examples=sizes["train"])
    records = session.trials(list(unique), stage=next(iter(unique.values())))
    done = dict(zip(unique, records, strict=True))
    return [done[trial.config] for trial in asked]
