"""`collect_generalisation`: the baseline in evaluation mode on training examples, beside validation (facts for the gap between them)."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.instruments.examples.yardsticks import renumbered_accuracy
from workbench.record.roles import Role
from workbench.studies.session import Session
from workbench.train.checkpoint import latest_checkpoint, load_model
from workbench.train.evaluation import values_each
from workbench.train.example_values import evaluation_batch, one_loss_a_batch
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload
from workbench.workloads.losses import CrossEntropy, SquaredError, label_of, prediction_of
from workbench.workloads.subsets import at_most

EXAMPLES = 1000  # of either split, at most: an accuracy is then known to 1.6 % (rule of thumb)
MANY_CLASSES = 1000  # beyond which they are not matched anew: a table of them takes too long
LAST_STEPS = 0.1  # share of the run whose training losses are what the loss in training mode is at its end


def collect_generalisation(session: Session) -> dict[str, Any]:
    """Return JSON facts on the gap between training and validation, at the last and at the selected checkpoint of the baseline.

    The price is one evaluation of at most 1,000 examples of either split for each of the two.

    Returns:
        "last" and "selected" (None where there is no such checkpoint; the same where they are one): "step", and under "train" and
        "validation" "examples", "loss", "se", and where examples have classes or numbers as targets "score" (accuracy, or
        correlation), "chance" (accuracy of the most common training class, or 0) and "renumbered" (accuracy if classes are matched
        anew); "training_mode": "loss" and "se" over the last steps; "constant": the loss of the best constant on validation, where
        known. "reason" where nothing was trained to the end.
    """
    workload, config = session.workload, session.config
    trial = session.trial(config, stage=Role.BASELINE)
    last = latest_checkpoint(trial.folder / "checkpoints")
    if trial.state != "complete" or last is None:
        return {"reason": f"the baseline is {trial.state}"}
    step = trial.trials["best_step"].dropna()
    best = trial.folder / "checkpoints" / f"step-{int(step.iloc[0]) if len(step) else -1:08d}"
    small = workload.replace(
        **{f"{split}_data": at_most(workload.data(split), EXAMPLES) for split in ("train", "validation")}
    )
    labels: dict[str, Tensor] = {}
    with isolated_rng():
        found = {"last": _checkpoint(small, session, last, labels)}
        found["selected"] = found["last"] if best == last else _checkpoint(small, session, best, labels)
    losses = trial.steps["loss"].to_numpy(dtype=np.float64)
    end = losses[-max(1, int(LAST_STEPS * losses.size)) :]
    mode = {"loss": float(end.mean()), "se": float(end.std() / math.sqrt(end.size)), "steps": int(end.size)}
    return {**found, "training_mode": mode, "constant": _constant(workload, labels)}


def _checkpoint(workload: Workload, session: Session, path: Path, labels: dict[str, Tensor]) -> dict[str, Any]:
    config = session.config
    model = load_model(build_model(workload, config, session.device), path)
    place = int((session.record.facts.get("data") or {}).get("target_part", 1))
    found: dict[str, Any] = {"step": int(path.name.removeprefix("step-"))}
    for split in ("train", "validation"):
        said: list[Tensor] = []
        true: list[Tensor] = []
        sizes: list[int] = []

        def observe(batch: Any, outputs: Any, examples: int, to: Any = (said, true, sizes)) -> None:
            said, true, sizes = to
            sizes.append(examples)
            given = label_of(workload.loss, batch, examples, place=place)
            predicted = prediction_of(outputs, given, examples)
            if given is not None and predicted is not None and given.shape == predicted.shape:
                said.append((predicted.float() if predicted.is_floating_point() else predicted).cpu())
                true.append(given.cpu())

        ((columns, weights),) = values_each(
            workload, [model], split=split, batch_size=evaluation_batch(workload, config, session.device), device=session.device,
            precision=config.precision, observe=observe,
        )  # fmt: skip
        losses, weigh = columns["loss"].numpy(), weights.numpy() / weights.numpy().sum()
        mean = float((losses * weigh).sum())
        se = float(np.sqrt(((weigh * (losses - mean)) ** 2).sum()))
        if one_loss_a_batch(workload, config, session.device):  # its values are as many as there are batches
            residuals = np.bincount(np.repeat(np.arange(len(sizes)), sizes), weigh * (losses - mean))
            se = float(np.sqrt((residuals**2).sum()))
        found[split] = {"examples": len(losses), "loss": mean, "se": se}
        whole = len({t.shape[1:] for t in true}) == 1 and sum(map(len, true)) == len(losses)
        if whole and (split == "train" or "train" in labels):  # outputs over pairs of a batch fit one split by chance
            labels[split] = torch.cat(true)
            found[split] |= _skill(torch.cat(said), labels[split], labels["train"])
    return found


def _skill(said: Tensor, true: Tensor, trained: Tensor) -> dict[str, Any]:
    """Return how far predictions agree with targets: classes, one an example, or numbers."""
    if true.is_floating_point() or said.is_floating_point():  # a single logit tells two classes by its size
        both = torch.stack([said.double().flatten(), true.double().flatten()])
        return {"score": float(torch.corrcoef(both)[0, 1].nan_to_num(0.0)), "chance": 0.0, "classes": None}
    if true.dim() > 1:
        return {}
    classes = len(torch.unique(torch.cat([trained, true, said.to(true.dtype)])))
    return {
        "score": float((said == true).double().mean()), "chance": float((true == trained.mode().values).double().mean()),
        "renumbered": renumbered_accuracy(said.numpy(), true.numpy()) if classes <= MANY_CLASSES else 0.0, "classes": classes,
    }  # fmt: skip


def _constant(workload: Workload, labels: dict[str, Tensor]) -> float | None:
    """Return the validation loss of the best constant that training examples suggest; None where the loss is of another kind."""
    if set(labels) != {"train", "validation"} or workload.weights is not None:
        return None
    train, held = labels["train"], labels["validation"]
    if isinstance(workload.loss, CrossEntropy):
        counts = train.bincount(minlength=int(max(train.max(), held.max())) + 1).double() + 0.5
        return float(-(counts / counts.sum()).log()[held].mean())
    if isinstance(workload.loss, SquaredError):
        return float((held.double() - train.double().mean(0)).square().mean())
    return None
