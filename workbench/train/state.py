"""`TrialState`: everything that training changes, built from a config or put back from a checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.errors import CheckpointError, ConfigError, WorkbenchError, WorkloadError
from workbench.schedules import lr_values
from workbench.train.checkpoint import Checkpoint
from workbench.train.parameters import FlatParameters
from workbench.train.rng import capture_rng, restore_rng, seed_all
from workbench.train.update_rules import Updater, make_updater
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_model

__all__ = ["TrialState", "build_model"]


def build_model(workload: Workload, config: TrainConfig, device: torch.device) -> nn.Module:
    """Return a fresh model on `device`, initialised under `shared_seed`, checked and in the asked precision.

    Raises:
        WorkloadError: `build_model` raised, with that error as the cause, or returned nothing to train.
    """
    seed_all(config.shared_seed)
    try:
        model = workload.build_model()
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"workload {workload.name!r}: build_model raised {type(error).__name__}: {error}. Call it alone to see where."
        ) from error
    check_model(model)
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(config.precision or "")
    return model.to(device=device, dtype=dtype)


class TrialState:
    """Model, flat parameters, optimizer state and step of one trial.

    Attributes:
        step: updates made so far.
        evaluated: whether the model was evaluated at this step.
        lr: learning rates of all steps on the device, shape (total_steps, lanes, 1).
    """

    def __init__(self, workload: Workload, config: TrainConfig, device: torch.device) -> None:
        if config.bn_stat_examples is not None:
            raise ConfigError(
                f"bn_stat_examples={config.bn_stat_examples} is not supported by this trainer yet: leave it at None, "
                "which normalises over the batch as the model does."
            )
        self.model = build_model(workload, config, device)
        self.flat = FlatParameters(self.model)
        self.updater: Updater = make_updater(config, self.flat.values, self.flat.parameters)
        self.lrs = lr_values(config)
        self.lr = torch.as_tensor(self.lrs, dtype=self.flat.values.dtype).to(device).view(-1, 1, 1)
        self.step = 0
        self.evaluated = False
        seed_all(config.shared_seed, config.per_host_seed)

    def checkpoint(self, *, seconds: float) -> Checkpoint:
        """Return a checkpoint of this moment."""
        trainer = {f"optimizer/{k}": v for k, v in self.updater.state().items()}
        trainer |= {f"rng/{k}": v for k, v in capture_rng().items()}
        meta = {"evaluated": self.evaluated, "seconds": seconds, "optimizer": self.updater.plain_state()}
        return Checkpoint(self.step, dict(self.model.state_dict()), trainer, meta)

    def load(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint, random state included.

        Raises:
            CheckpointError: it does not fit the model or the optimizer.
        """
        parts: dict[str, dict[str, torch.Tensor]] = {"optimizer": {}, "rng": {}}
        for name, tensor in checkpoint.trainer.items():
            kind, rest = name.split("/", 1)
            parts[kind][rest] = tensor
        try:
            self.model.load_state_dict(checkpoint.model)
            self.updater.load(parts["optimizer"], checkpoint.meta["optimizer"])
        except (RuntimeError, LookupError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint of step {checkpoint.step} does not fit the model ({str(error).splitlines()[-1].strip()}). "
                "The code of the workload has changed since: give a new folder with out=..."
            ) from error
        restore_rng(parts["rng"])
        self.step, self.evaluated = checkpoint.step, bool(checkpoint.meta["evaluated"])
