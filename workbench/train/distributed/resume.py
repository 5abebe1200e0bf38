"""What a trial goes on from, on all hosts: one writes the checkpoint, and what is each host's own is in it (P4.2).

That is its random state, and the running statistics of its batch norm layers: the model of a checkpoint has them merged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from workbench.record.json_values import dumps
from workbench.train.batch_norm import batch_norm_layers
from workbench.train.checkpoint import Checkpoint
from workbench.train.distributed.process_group import HostGroup

__all__ = ["gather_states", "own_state", "running_statistics", "share_checkpoint"]

KINDS = ("rng/", "data/", "statistics/")


def share_checkpoint(hosts: HostGroup, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return the main host's checkpoint on all of them; only the main one needs to see its folder.

    Args:
        hosts: the group.
        checkpoint: of the main host; None where the trial begins. What the others give does not count.
    """
    if hosts.size == 1:
        return checkpoint
    head = None if checkpoint is None else {"step": checkpoint.step, "meta": checkpoint.meta}
    told = json.loads(hosts.from_main(dumps(head).encode()))
    if told is None:
        return None
    parts = [
        load_tensors(hosts.from_main(None if checkpoint is None else save_tensors(tensors)))
        for tensors in (({}, {}) if checkpoint is None else (checkpoint.model, checkpoint.trainer))
    ]
    return checkpoint if hosts.main else Checkpoint(int(told["step"]), parts[0], parts[1], told["meta"])


def running_statistics(hosts: HostGroup, model: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of this host's batch norm layers, the model's own tensors; none where it is alone.

    Args:
        hosts: the group.
        model: of this host.
    """
    if hosts.size == 1:
        return {}
    layers = batch_norm_layers(model).items()
    return {f"{name}.{leaf}": buffer for name, layer in layers for leaf, buffer in layer.named_buffers(recurse=False)}


def gather_states(hosts: HostGroup, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return everybody's state under names of their own: the main host's as given, the others' below host<rank>/.

    Args:
        hosts: the group.
        states: of this host, on the CPU: names begin with rng/, data/ or statistics/.
    """
    if hosts.size == 1:
        return dict(states)
    found: dict[str, Tensor] = {}
    for rank, content in enumerate(hosts.gather_bytes(save_tensors(dict(states)))):
        found |= {f"{_prefix(rank)}{name}": tensor for name, tensor in load_tensors(content).items()}
    return found


def own_state(hosts: HostGroup, trainer: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return this host's state from a checkpoint's tensors; None where it had no part in that training.

    Args:
        hosts: the group.
        trainer: `Checkpoint.trainer`.
    """
    prefix = _prefix(hosts.rank)
    own = {name.removeprefix(prefix): t for name, t in trainer.items() if name.startswith(prefix)}
    return {name: t for name, t in own.items() if name.startswith(KINDS)} or None


def _prefix(rank: int) -> str:
    return f"host{rank}/" if rank else ""
