"""What can be said about a workload before and at its first step; the trainer calls these."""

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from workbench.config import TrainConfig
from workbench.errors import ConfigError, DataError, UnknownNameError, UsageError, WorkloadError, nearest
from workbench.record.metrics import larger_is_better
from workbench.workloads.base import Workload


def check_workload(workload: object) -> Workload:
    """Return it; raise `UsageError` where it is no workload."""
    if not isinstance(workload, Workload):
        raise UsageError(
            f"workload must be a Workload, not {type(workload).__name__} ({str(workload)[:60]}). "
            "Load one by name with workbench.load_workload(...)."
        )
    return workload


def chosen_config(workload: object, config: object) -> TrainConfig:
    """Return what to train with: `config`, or the workload's own where it is None; a `ConfigError` where it is something else."""
    own = check_workload(workload).config
    if config is not None and not isinstance(config, TrainConfig):
        raise ConfigError(
            f"config must be a TrainConfig, not {type(config).__name__} ({str(config)[:60]}). Write "
            "TrainConfig(peak_lr=..., total_steps=..., batch_size=...), or workload.config.replace(peak_lr=...)."
        )
    return own if config is None else config


def check_data(workload: Workload, config: TrainConfig) -> dict[str, int]:
    """Return the number of examples of every split; a `DataError` or `ConfigError` where `config` cannot train on them."""
    sizes = {}
    for split, data in workload.splits.items():
        try:
            sizes[split] = len(data)
        except (TypeError, NotImplementedError) as error:
            raise DataError(
                f"workload {workload.name!r}: {split}_data ({type(data).__name__}) has no length, so an epoch has no end. "
                "Give the dataset a __len__ with the number of examples it yields, or make it map-style."
            ) from error
    for split, size in sizes.items():
        if size == 0:
            raise DataError(
                f"workload {workload.name!r}: the {split} split has 0 examples; it needs at least 1. "
                f"Look at the filter or the path that {split}_data was made with."
            )
    if config.batch_size > sizes["train"]:
        raise ConfigError(
            f"workload {workload.name!r}: batch_size={config.batch_size} is more than the {sizes['train']} examples of "
            f"the train split. Allowed is 1 to {sizes['train']}, and the largest trains on the full batch."
        )
    return sizes


def check_selection(workload: Workload, config: TrainConfig) -> None:
    """Check that `config.select` names a split and a metric that `workload` has, the right way round (P4.5)."""
    metrics = ("loss", *workload.metrics)
    allowed = [f"{split}/{metric}" for split in workload.splits for metric in metrics]
    if config.select not in allowed:
        raise UnknownNameError(
            f"workload {workload.name!r} has no select={config.select!r}.{nearest(config.select, allowed)}"
        )
    metric = config.select.split("/", 1)[1]
    if config.select_mode == "min" and larger_is_better(metric):
        raise ConfigError(
            f"select={config.select!r} with select_mode='min' takes the checkpoint with the smallest {metric}. Write "
            "select_mode='max'; if smaller really is better, give the metric another name."
        )


def check_model(model: object) -> None:
    """Raise a `WorkloadError` where `model` is no module, has no parameters, or all are frozen or one is not yet initialised."""
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"build_model returned {type(model).__name__}, but must return a torch.nn.Module. Write "
            "build_model=lambda: Net(), and check that the function has a return statement."
        )
    parameters = dict(model.named_parameters())
    if not parameters:
        raise WorkloadError(
            f"{type(model).__name__} has no parameters, so there is nothing to train. Layers kept in a plain list or "
            "dict are not found: use nn.ModuleList or nn.ModuleDict."
        )
    lazy = [name for name, parameter in parameters.items() if is_lazy(parameter)]
    if lazy:
        raise WorkloadError(
            f"{type(model).__name__} has parameters without a shape: {', '.join(lazy[:3])}. Call the model once on one "
            "batch inside build_model, or give the layers their sizes."
        )
    if meta := [name for name, parameter in parameters.items() if parameter.is_meta]:
        raise WorkloadError(
            f"{type(model).__name__} has parameters on the meta device, which hold no values: {', '.join(meta[:3])}. Build it without "
            'torch.device("meta"), or call model.to_empty(device="cpu") and initialise it inside build_model.'
        )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise WorkloadError(
            f"all {len(parameters)} parameters of {type(model).__name__} are frozen (requires_grad is False), so there "
            "is nothing to train. Leave at least one of them unfrozen in build_model."
        )


def check_fresh(first: nn.Module, second: nn.Module) -> None:
    """Raise a `WorkloadError` where two models of `build_model` share a parameter: a second trial would go on where the first ended."""
    seen = {id(parameter) for parameter in first.parameters()}
    shared = [name for name, parameter in second.named_parameters() if id(parameter) in seen]
    if shared:
        raise WorkloadError(
            f"build_model returned the same parameters twice ({', '.join(shared[:3])}): every trial must start from "
            "its own. Build the model inside the function: build_model=lambda: Net()."
        )


def check_loss_shape(values: object, batch_examples: int, *, what: str = "the loss", per_batch: bool = False) -> None:
    """Raise a `WorkloadError` unless a loss, a metric or the weights, called `what`, have one value per example; or one in all, if `per_batch`."""
    if not isinstance(values, Tensor):
        raise WorkloadError(f"{what} returned {type(values).__name__}, but must return a tensor ({batch_examples},).")
    shape = tuple(values.shape)
    if shape == (batch_examples,) or (per_batch and shape == ()):
        return
    raise WorkloadError(
        f"{what} has shape {shape}, but must have one value per example, shape ({batch_examples},). "
        + _shape_advice(shape, batch_examples, is_loss=what == "the loss")
    )


def check_weights(weights: Tensor, *, where: str, share: bool = False) -> None:
    """Raise a `WorkloadError` where a weight is negative or not finite, or all are zero, which only a `share` of the examples may be."""
    bad = (~torch.isfinite(weights) | (weights < 0)).nonzero().flatten()
    if bad.numel():
        raise WorkloadError(
            f"weights(batch) gives {weights[bad[0]].item()} to example {int(bad[0])} of {where}, but a weight must be finite "
            "and at least 0. Clamp or repair it in the function, and give 0 to an example that shall not count."
        )
    if not share and not bool((weights > 0).any()):
        raise WorkloadError(
            f"weights(batch) gives 0 to all {weights.numel()} examples of {where}, so there is no mean to take. At least one "
            "weight must be above 0: look at what the function compares, such as a padding value."
        )


def _shape_advice(shape: tuple[int, ...], batch_examples: int, *, is_loss: bool) -> str:
    if shape in ((), (1,)):
        if not is_loss:
            return "It was averaged already: return the values before the mean."
        return (
            'It was averaged already: pass reduction="none" to the loss function. `Trainer` allows one value per batch, '
            "of shape (), where there are no weights."
        )
    if shape == (batch_examples, 1):
        return "Drop the last axis with .squeeze(-1)."
    if shape == (batch_examples, batch_examples):
        return (
            "Outputs (batch, 1) met targets (batch,) and every output was compared with every target: "
            "make the shapes equal first, with outputs.squeeze(-1)."
        )
    if shape[:1] == (batch_examples,):
        return "Average over the other axes, for example with .flatten(1).mean(1)."
    return "The first axis must be the examples, in the order of the batch."
