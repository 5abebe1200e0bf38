"""`CheckpointManager`: checkpoints of what lives on the servers, written and read by the coordinator (T10.3 to T10.6)."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.checks import check_integer
from workbench.errors import CheckpointError, UsageError
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.coordinator.dispatch import BACK_S
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.variable import RemoteTensor, ShardedVariable, Variable
from workbench.train.checkpoint import Checkpoint, delete_whole, latest_checkpoint, load_checkpoint, save_checkpoint

ASIDE = ".kept"


def packed_state(state: Mapping[str, Any], model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `PlacedModule.state_dict` has beside a model's state dict: optimizer slots, buffers that are not persistent."""
    slots = {f"optimizer/{slot}/{key}": v for slot, whole in state["slots"].items() for key, v in whole.items()}
    plain = {f"plain/{slot}": value for slot, value in state["plain_slots"].items()}
    return slots | plain | {f"buffers/{key}": value for key, value in state["buffers"].items() if key not in model}


def load_placed(placed: PlacedModule, checkpoint: Checkpoint) -> None:
    """Give the servers what a checkpoint of `CheckpointManager` or of a trial holds of a module; raises `CheckpointError` where slots differ."""
    slots: dict[str, dict[str, Tensor]] = {}
    for name, value in _within("optimizer", checkpoint.trainer).items():
        slot, _, key = name.partition("/")
        slots.setdefault(slot, {})[key] = value
    plain, here = _within("plain", checkpoint.trainer), placed.state_dict()
    given, own = sorted({*slots, *plain}), sorted({*here["slots"], *here["plain_slots"]})
    if given != own:
        raise CheckpointError(
            f"The checkpoint holds the optimizer state {given}, and optimizer={placed.config.optimizer!r} has {own}. Place the "
            "module with the optimizer that it was trained with; a checkpoint of an earlier version has to be written again."
        )
    for slot in sorted(slots):
        known = {*here["parameters"]} & {*checkpoint.model}
        strange = sorted(({*slots[slot]} ^ {*here["slots"].get(slot, ())}) & known)
        if strange:
            raise CheckpointError(
                f"The checkpoint holds {slot!r} of other parameters than the optimizer has here: {', '.join(strange[:3])} ({len(strange)} differ). "
                "Place the module with the optimizer and the embeddings= that it was trained with."
            )
    model, buffers = checkpoint.model, placed.start_buffers()
    trained = checkpoint.meta.get("parameters") or {part.parameter for held in placed.stretches() for part in held}
    placed.load_state_dict(
        {
            "parameters": {key: model[key] for key in trained if key in model}, "frozen": model, "slots": slots, "steps": checkpoint.step,
            "buffers": {k: model.get(k, v) for k, v in buffers.items()} | _within("buffers", checkpoint.trainer),
            "plain_slots": plain,
        }
    )  # fmt: skip


def _within(folder: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{folder}/"): value for key, value in tensors.items() if key.startswith(f"{folder}/")}


@dataclass(frozen=True)
class Restored:
    """What a checkpoint said."""

    path: Path
    steps: int  # updates that it holds
    epoch: int | None  # how many epochs it holds; None where `save` was not told


class CheckpointManager:
    """Keeps the newest checkpoints of a placed module, of variables, or of both, in one folder.

    A checkpoint holds each parameter and each of its optimizer's slots whole, whatever the shards: it is restored into any number
    of shards and servers (T14.5). `model.safetensors` in it is the module's plain state dict, which `load_model` reads without a
    cluster. It is whole or absent after a crash, and no code runs when it is read. Save while nothing is scheduled, after `join`:
    servers do not wait for each other. The checkpoints of a trial of `ParameterServerTrainer` can be restored as well.

    Args:
        placed: module to save; None is none.
        directory: folder of the checkpoints, made where it is absent.
        variables: name -> variable.
        max_to_keep: how many checkpoints to keep; None keeps all.

    Raises:
        UsageError: there is nothing to save, or max_to_keep is no integer of at least 1.
    """

    def __init__(
        self,
        placed: PlacedModule | None,
        directory: str | Path,
        *,
        variables: Mapping[str, Variable | ShardedVariable] | None = None,
        max_to_keep: int | None = 3,
    ) -> None:
        if placed is not None and not isinstance(placed, PlacedModule):
            raise UsageError(
                f"placed must be what strategy.place(module, config) returned, or None, not {type(placed).__name__}."
            )
        if variables is not None and not isinstance(variables, Mapping):
            raise UsageError(
                'variables must be a dict of names, such as {"counts": counts}: they are found again by them.'
            )
        self.placed, self.directory, self.variables = placed, Path(directory), dict(variables or {})
        if placed is None and not self.variables:
            raise UsageError("CheckpointManager has nothing to save: give a placed module, variables=, or both.")
        strange = [name for name, value in self.variables.items() if not isinstance(value, RemoteTensor)]
        if strange:
            raise UsageError(f"variables={strange} are no variables of a cluster: make them by strategy.variable.")
        if max_to_keep is not None:
            check_integer("max_to_keep", max_to_keep, error=UsageError, hint=", or None for all")
        self.max_to_keep = max_to_keep
        self._reached = 0

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that are there, newest first."""
        return sorted(self.directory.glob("step-*"), key=lambda path: path.name, reverse=True)

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint, None where there is none."""
        return latest_checkpoint(self.directory)

    def save(self, *, epoch: int | None = None, steps: int | None = None) -> Path:
        """Write a checkpoint, delete what is more than `max_to_keep`, and return its folder.

        Args:
            epoch: how many epochs are done; readers such as `SidecarEvaluator` tell the last one by it.
            steps: updates so far; None is what the placed module counts.

        Raises:
            CheckpointError: the folder holds later checkpoints, of another run: they would be taken for this one's newest.
            RecordError: the disk is full or not writable; earlier checkpoints are untouched.
        """
        self._mend()
        checkpoint = self._checkpoint(epoch, steps)
        latest = self.latest
        ahead = 0 if latest is None else int(latest.name.removeprefix("step-"))
        if latest is not None and ahead > max(checkpoint.step, self._reached):
            raise CheckpointError(
                f"{self.directory} holds {latest.name}, of a run that was {ahead - checkpoint.step} steps further on. Call "
                "restore() to go on from it, or give another folder."
            )
        target = self.directory / f"step-{checkpoint.step:08d}"
        if target.exists():
            target.rename(_aside(target))
        try:
            path = save_checkpoint(self.directory, checkpoint)
        finally:
            self._mend()
        self._reached = max(self._reached, checkpoint.step)
        for old in self.checkpoints[self.max_to_keep :] if self.max_to_keep is not None else []:
            delete_whole(old)
        return path

    def restore(self, path: str | Path | None = None) -> Restored | None:
        """Load the checkpoint in this folder, or the newest, into the servers; returns None where there is none yet.

        Raises:
            CheckpointError: it is damaged, or does not match what is to be restored, in a name, a shape or the optimizer (T10.6).
        """
        self._mend()
        path = self.latest if path is None else Path(path)
        if path is None:
            return None
        checkpoint = load_checkpoint(path)
        self._match(path, checkpoint)
        if self.placed is not None:
            load_placed(self.placed, checkpoint)
        for name, variable in self.variables.items():
            variable.assign(checkpoint.trainer[f"variables/{name}"])
        self._reached = checkpoint.step
        return Restored(path, checkpoint.step, checkpoint.meta.get("epoch"))

    def recover(self, coordinator: ClusterCoordinator, *, wait_s: float = BACK_S) -> Restored:
        """After a server's death: wait until it is there again, and give all servers what the newest checkpoint holds.

        For a loop of your own that caught an `UnavailableError` of a "ps": it goes on with the same coordinator, workers and datasets, from
        the steps of what is returned. What else lay on that server is lost. That error is raised where it is not back within `wait_s`.
        """
        if self.latest is None:
            raise CheckpointError(f"{self.directory} holds no checkpoint to go on from: save() one before the loop.")
        restored: list[Restored] = []
        coordinator.meet_servers(lambda: restored.append(self._restore_anew()), wait_s)
        return restored[-1]

    def _restore_anew(self) -> Restored:
        if self.placed is not None:
            self.placed.make_blocks()
        for variable in self.variables.values():
            for shard in variable.variables:
                shard.make_missing()
        restored = self.restore()
        assert restored is not None
        return restored

    def _mend(self) -> None:
        """Put back what a process that was killed had put aside, and take away what it left half written or half deleted."""
        for left in self.directory.glob(".step-*"):
            target = left.with_name(left.name.removeprefix(".").removesuffix(ASIDE))
            if left == _aside(target) and not target.exists():
                left.rename(target)
            else:
                shutil.rmtree(left, ignore_errors=True)

    def _checkpoint(self, epoch: int | None, steps: int | None) -> Checkpoint:
        meta: dict[str, Any] = {"epoch": epoch, "variables": sorted(self.variables), "parameters": []}
        trainer: dict[str, Tensor] = {f"variables/{name}": value.read() for name, value in self.variables.items()}
        if self.placed is None:
            return Checkpoint(self._reached + 1 if steps is None else steps, {}, trainer, meta)
        state, module = self.placed.state_dict(), self.placed.module()
        named = dict(module.named_parameters())
        for key, value in state["parameters"].items():
            named[key].data = value
        config = self.placed.config
        meta |= {"parameters": list(state["parameters"]), "optimizer": config.optimizer, "config": config.to_dict()}
        model = module.state_dict()
        return Checkpoint(
            int(state["steps"] if steps is None else steps), model, trainer | packed_state(state, model), meta
        )

    def _match(self, path: Path, checkpoint: Checkpoint) -> None:
        here, there = sorted(self.variables), checkpoint.meta.get("variables", [])
        if here != there:
            raise CheckpointError(f"{path} holds the variables {there}; {here} are to be restored. Give the same ones.")
        for name, variable in self.variables.items():
            stored = checkpoint.trainer[f"variables/{name}"]
            if stored.shape != variable.shape or stored.dtype != variable.dtype:
                raise CheckpointError(
                    f"Variable {name!r} is {tuple(stored.shape)}, {stored.dtype} in {path} and {tuple(variable.shape)}, "
                    f"{variable.dtype} here. Make it as it was when the checkpoint was written."
                )
        if (self.placed is not None) != bool(checkpoint.model):
            holds, has = ("a", "has none") if checkpoint.model else ("no", "has one")
            raise CheckpointError(f"{path} holds {holds} module, and the manager {has}.")
        optimizer = checkpoint.meta.get("optimizer")
        if self.placed is not None and optimizer and optimizer != self.placed.config.optimizer:
            raise CheckpointError(
                f"{path} holds the state of optimizer={optimizer!r}; the module is placed with "
                f"{self.placed.config.optimizer!r}. Place it with the optimizer that it was trained with."
            )


def _aside(path: Path) -> Path:
    """Where the checkpoint of a step is while another one of the same step is written."""
    return path.with_name(f".{path.name}{ASIDE}")
