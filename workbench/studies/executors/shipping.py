"""A workload and its trainer on their way to a worker: by name where they have one, pickled where not."""

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from workbench.config import TrainConfig
from workbench.errors import ConfigError, WorkbenchError, WorkloadError
from workbench.record.folder import fingerprint_difference
from workbench.train.batches import resolve_device
from workbench.train.trainer import Trainer, fingerprint
from workbench.workloads.base import Workload
from workbench.workloads.registry import load_workload

Pack = Callable[[Any], bytes]


@dataclass(frozen=True)
class Shipment:
    """What a worker needs once, for all chunks of a study."""

    key: str
    source: str | None
    workload: bytes  # or the baseline config, where there is a source
    trainer: bytes
    config: bytes
    fingerprint: Mapping[str, Any] | None  # what code and data give here with this config; None where they raise
    folder: str
    paths: tuple[str, ...]


def pack_shipment(pack: Pack, workload: Workload, trainer: Trainer, config: TrainConfig) -> Shipment:
    """Return a shipment; the trainer's device is settled here, so that a worker trains on the same kind."""
    device = resolve_device(trainer.device)
    try:
        found = fingerprint(workload, config, device)
    except Exception:
        found = None  # its trials fail in the worker, and there it is explained
    source = _located(workload.source)
    if source is None:
        said = (
            f"workload {workload.name!r} cannot be sent to a Ray worker: {{parts}} cannot be pickled ({{reason}}). Put the workload "
            "into a file and load it by name, load_workload('path/to/file.py:attribute'), so that every worker builds its own; or "
            "build what cannot be pickled (open files, locks, connections) where it is used, inside build_model or the dataset's "
            "__getitem__; or use executor='local'."
        )
        own = {f.name: getattr(workload, f.name) for f in fields(workload)}
        packed = _packed(pack, workload, WorkloadError, said, own)
    else:
        packed = packed_configs(pack, [workload.config])
    said = (
        "the trainer cannot be sent to a Ray worker: hook {parts} cannot be pickled ({reason}). Open files and connections in "
        "on_start, not in __init__; or use executor='local'."
    )
    hooks = {type(hook).__name__: hook for hook in trainer.hooks}
    return Shipment(
        key=uuid4().hex,
        source=source,
        workload=packed,
        trainer=_packed(pack, replace(trainer, device=device.type), ConfigError, said, hooks),
        config=packed_configs(pack, [config]),
        fingerprint=found,
        folder=str(Path.cwd()),
        paths=tuple(sys.path),
    )


def unpack_shipment(shipment: Shipment, node: str) -> tuple[Workload, Trainer]:
    """Return workload and trainer in a worker, where they are the same as in the driver."""
    if Path(shipment.folder).is_dir():
        os.chdir(shipment.folder)
    sys.path += [path for path in shipment.paths if path not in sys.path and Path(path).exists()]
    try:
        if shipment.source is None:
            workload: Workload = pickle.loads(shipment.workload)
        else:
            workload = load_workload(shipment.source)
            workload = workload.replace(config=pickle.loads(shipment.workload)[0])
        trainer, (config,) = pickle.loads(shipment.trainer), pickle.loads(shipment.config)
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"the workload cannot be loaded on node {node}: {type(error).__name__}: {error}. Its files and packages must be "
            "on every machine of the cluster, in the same places."
        ) from error
    _compare(shipment, workload, config, torch.device(trainer.device), node)
    return workload, trainer


def packed_configs(pack: Pack, configs: list[TrainConfig]) -> bytes:
    """Return configs as bytes; a function in one of them that cannot be pickled is a `ConfigError`."""
    said = (
        "optimizer or schedule of a config cannot be sent to a Ray worker: {reason}. Write it as a function of "
        "a module that builds what it needs when it is called, or use executor='local'."
    )
    return _packed(pack, configs, ConfigError, said)


def _located(source: str | None) -> str | None:
    """Return a source that means the same in another folder: the path of a file is made absolute."""
    if source is None or ":" not in source:
        return source
    file, _, attribute = source.rpartition(":")
    return f"{Path(file).resolve()}:{attribute}" if file.endswith(".py") else source


def _packed(
    pack: Pack, value: Any, error: type[WorkbenchError], said: str, parts: Mapping[str, Any] | None = None
) -> bytes:
    """Return a value as bytes, or raise an error that names those of its parts that cannot be pickled."""

    def why_not(part: Any) -> str:
        try:
            pack(part)
        except Exception as cause:
            lines = [line for line in str(cause).splitlines() if line.strip()]
            return f"{type(cause).__name__}: {lines[0] if lines else 'no message'}"
        return ""

    try:
        return pack(value)
    except Exception as cause:
        culprits = [name for name, part in (parts or {}).items() if why_not(part)]
        said = said.replace("{parts}", ", ".join(culprits) or "it").replace("{reason}", why_not(value))
        raise error(said) from cause


def _compare(shipment: Shipment, workload: Workload, config: TrainConfig, device: torch.device, node: str) -> None:
    if shipment.fingerprint is None:
        return
    try:
        found = fingerprint(workload, config, device)
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"workload {workload.name!r} does not run on node {node}, though it does here: {type(error).__name__}: {error}."
        ) from error
    difference = fingerprint_difference(shipment.fingerprint, found)
    if difference is not None:
        key, here, there = difference
        raise WorkloadError(
            f"workload {workload.name!r} is not the same on node {node} ({key}: here {here!r}, there {there!r}). Copy the "
            "same code and data to every machine of the cluster, then run the same call again."
        )
