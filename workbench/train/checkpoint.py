"""Checkpoints: safetensors and JSON, whole or absent after a crash, and no code runs when one is read.

`model.safetensors` is a plain state dict, `trainer.safetensors` optimizer and random state, `meta.json` the rest. What is
superseded within seconds never reaches the disk.
"""

import json
import os
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor, nn

from workbench.errors import CheckpointError, RecordError
from workbench.record.json_values import dumps
from workbench.record.read import select_best

WRITE_SECONDS = 5.0  # rule of thumb: what a killed process may have to train again
WAITING_BYTES = 32 * 2**20  # rule of thumb: larger checkpoints are written at once instead of waiting in memory
TRIAL_BYTES = 2 * 2**30  # rule of thumb: of a trial's checkpoints that are larger together fewer of the best are kept
_FILES = ("model.safetensors", "trainer.safetensors")


class Checkpoint(NamedTuple):
    """One checkpoint in memory: updates made before it, the model's state dict, optimizer and random state, JSON values."""

    step: int
    model: dict[str, Tensor]
    trainer: dict[str, Tensor]
    meta: dict[str, Any]


def size_of(checkpoint: Checkpoint) -> int:
    """Return the bytes of its tensors."""
    return sum(t.nbytes for part in (checkpoint.model, checkpoint.trainer) for t in part.values())


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU that share no memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def until_written(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors themselves where they are too large to wait, and so are written before they change; else copies."""
    large = sum(t.nbytes for t in tensors.values()) > WAITING_BYTES
    return dict(tensors) if large else host_copies(tensors)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, sync: bool = True) -> Path:
    """Write `folder/step-<n>` whole or not at all, and return it."""
    target = folder / f"step-{checkpoint.step:08d}"
    if target.exists():
        return target
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        for name, tensors in zip(_FILES, (checkpoint.model, checkpoint.trainer), strict=True):
            save_file(_apart(tensors), temporary / name)
        crc32 = {name: _crc32(temporary / name) for name in _FILES}
        meta = {"step": checkpoint.step, **checkpoint.meta, "crc32": crc32}
        (temporary / "meta.json").write_text(dumps(meta), encoding="utf-8")
        for name in (*_FILES, "meta.json") if sync else ():
            with (temporary / name).open("rb") as file:
                os.fsync(file.fileno())
        temporary.rename(target)
    except (OSError, SafetensorError) as error:
        raise RecordError(
            f"cannot write {target}: {getattr(error, 'strerror', None) or error}. Nothing that was saved before is lost; free some space or "
            "choose another folder with out=..., then run the same call again to go on."
        ) from error
    finally:
        if temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU; those that share memory with another one, which the file format refuses, as copies."""
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    end = 0
    for name, tensor in sorted(found.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            found[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return found


def _crc32(path: Path) -> int:
    with path.open("rb") as file:
        crc = 0
        while block := file.read(2**20):
            crc = zlib.crc32(block, crc)
    return crc


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read one checkpoint."""
    path = Path(path)
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        contents = [(path / name).read_bytes() for name in _FILES]
        for name, content in zip(_FILES, contents, strict=True):
            if zlib.crc32(content) != meta["crc32"][name]:
                raise CheckpointError(f"{name} does not match its checksum")
        if path.name != f"step-{meta['step']:08d}":
            raise CheckpointError(f"meta.json speaks of step {meta['step']}")
        model, trainer = (load_tensors(content) for content in contents)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, CheckpointError) as error:
        others = ", ".join(p.name for p in sorted(path.parent.glob("step-*")) if p != path) or "none"
        raise CheckpointError(
            f"checkpoint {path} is damaged: {error}. Delete this folder and run again to go on from an earlier one "
            f"(there are: {others})."
        ) from error
    return Checkpoint(int(meta["step"]), model, trainer, meta)


def load_model(model: nn.Module, path: str | Path, checkpoint: Checkpoint | None = None) -> nn.Module:
    """Load the weights of a checkpoint, which may have been read already, into `model` and return it (P4.5)."""
    stored = checkpoint or load_checkpoint(path)
    try:
        model.load_state_dict(stored.model)
    except RuntimeError as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit {type(model).__name__}: {str(error).splitlines()[-1].strip()} "
            "Build the model with the code and config that it was trained with."
        ) from error
    return model


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the most steps, None where there is none yet."""
    return max(folder.glob("step-*"), key=lambda p: p.name, default=None)


def prune(folder: Path, evaluated: Mapping[int, float], *, keep_best: int, mode: str) -> None:
    """Delete all checkpoints but the `keep_best` best and the latest (P4.4).

    `evaluated` is step -> value that selection compares; NaN is never among the best, ties go to the earliest.
    """
    present = {int(p.name.removeprefix("step-")): p for p in folder.glob("step-*")}
    if not present:
        return
    kept = {max(present), *best_steps({s: v for s, v in evaluated.items() if s in present}, keep_best, mode=mode)}
    for step, path in present.items():
        if step not in kept:
            delete_whole(path)


def delete_whole(path: Path) -> None:
    """Take a folder away at one blow, so that nobody finds half of it, also where this process is killed on the way."""
    doomed = path.with_name(f".{path.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def best_steps(values: Mapping[int, float], count: int, *, mode: str) -> Sequence[int]:
    """Return the steps of the `count` best finite values, best first, earliest first among equals."""
    left = dict(values)
    best: list[int] = []
    while len(best) < count and (found := select_best(list(left), list(left.values()), mode=mode)) is not None:
        best.append(found[0])
        del left[found[0]]
    return best


class SilentStore:
    """That of a process that trains along while another one writes (P7.2): it keeps the step of the newest checkpoint alone."""

    due = False

    def __init__(self, latest: int | None = None) -> None:
        self.latest = latest

    def add(self, checkpoint: Checkpoint, evaluated: Mapping[int, float]) -> None:  # noqa: ARG002
        """Remember the step."""
        self.latest = checkpoint.step

    def write(self, evaluated: Mapping[int, float]) -> None:
        """Write nothing."""


class CheckpointStore:
    """Keeps the best `keep_best` checkpoints of a trial and its latest (P4.4), in memory first and then on disk.

    One that is larger than `WAITING_BYTES` is to be written before the next update, and need not be a copy. Where they would take
    more than `TRIAL_BYTES` together, fewer of the best are kept, at least one.
    """

    def __init__(self, folder: Path, *, keep_best: int, mode: str) -> None:
        self.folder = folder
        self._keep_best, self._mode = keep_best, mode
        self._waiting: dict[int, Checkpoint] = {}
        self._written_at = time.perf_counter()

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, written or waiting."""
        path = latest_checkpoint(self.folder)
        written = [] if path is None else [int(path.name.removeprefix("step-"))]
        return max([*written, *self._waiting], default=None)

    def add(self, checkpoint: Checkpoint, evaluated: Mapping[int, float]) -> None:
        """Take one checkpoint, whose tensors must not change any more; `evaluated` is that of `prune`."""
        self._waiting[checkpoint.step] = checkpoint
        best = best_steps({s: v for s, v in evaluated.items() if s in self._waiting}, self._keep_best, mode=self._mode)
        kept = {checkpoint.step, *best}
        self._waiting = {step: c for step, c in self._waiting.items() if step in kept}

    @property
    def due(self) -> bool:
        """Whether what waits is too old or too large to wait on."""
        late = time.perf_counter() - self._written_at > WRITE_SECONDS
        return bool(self._waiting) and (late or sum(map(size_of, self._waiting.values())) > WAITING_BYTES)

    def write(self, evaluated: Mapping[int, float]) -> None:
        """Write what waits, and delete from disk what is neither among the best nor the latest."""
        sync = time.perf_counter() - self._written_at > WRITE_SECONDS
        each = max(map(size_of, self._waiting.values()), default=0)
        self._keep_best = max(1, min(self._keep_best, TRIAL_BYTES // max(each, 1) - 1))
        for step in sorted(self._waiting):
            save_checkpoint(self.folder, self._waiting[step], sync=sync)
            del self._waiting[step]
        prune(self.folder, evaluated, keep_best=self._keep_best, mode=self._mode)
        self._written_at = time.perf_counter()
