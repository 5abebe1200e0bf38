"""`HostsWatch`: all watches of one rank together, and the file with its facts; those of collectives, files and the trainer are here."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed import distributed_c10d

from workbench.errors import UsageError
from workbench.record.folder import write_atomic
from workbench.record.json_values import to_json
from workbench.topics.hosts.watch_data import DrawWatch, LoaderWatch
from workbench.topics.hosts.watch_state import Patches, State, Watchdog, hash_of, looked_at, rank_file
from workbench.topics.hosts.watch_training import BufferWatch, ModelWatch, UpdateWatch
from workbench.workloads.items import in_its_own_order

_JOINING = (
    "all_reduce", "reduce", "all_gather", "gather", "all_gather_into_tensor", "all_gather_object", "gather_object",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv",
)  # fmt: skip
_OTHERS = ("broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "barrier", "monitored_barrier")
_CHECKPOINT = re.compile(r"\.(pt|pth|ckpt|bin|safetensors|distcp)$", re.IGNORECASE)
_NEVER = re.compile(
    r"^/(dev|proc|sys)/|__pycache__|\.(pyc|lock)$|/\.(cache|config|triton|nv)/|torchinductor|/tmp[a-z0-9_]{8}$|"
    rf"/pymp-|^pipe:|^socket:|/torchelastic_|/status-\d+\.\d+\.tmp$|^{re.escape(tempfile.gettempdir())}/[a-z0-9_]{{8}}$"
)
_OWN = re.compile(r"\.?(rank|status|stack|error|draws)-\d")
MAX_FILES = 2000
_LISTENING: list[FileWatch] = []
"""Python cannot take an audit hook off again, so there is one for good, and watches come and go."""


def read_facts(folder: Path) -> dict[str, Any]:
    """Return `{"ranks": [...]}`, what every rank in the folder has written, by rank."""
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]
    ranks.sort(key=lambda found: int(found["rank"]))
    return {"ranks": [found for found in ranks if found["world"] == ranks[0]["world"]]}  # others are of an earlier job


class HostsWatch:
    """Observes this process, one rank, from now until `close`; a context manager.

    What is watched belongs to torch: models, optimizers, loaders, samplers, collectives, clipping and `torch.save`; and to Python:
    files that are opened for writing. Nothing is drawn, reordered or rounded differently. The facts go to `folder`, the same for
    all ranks; the stack too, after `timeout_s` without progress. A rank that was `launched` must not start any itself.
    """

    def __init__(
        self, folder: Path, *, timeout_s: float | None = None, stop_after: int | None = None, launched: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.state = state = State(folder.resolve())
        rank_file(state.folder, "rank", state.rank).unlink(missing_ok=True)
        self._patches = patches = Patches()
        buffers, loaders = BufferWatch(state), LoaderWatch(state, patches)
        models, files = ModelWatch(state, patches, buffers), FileWatch(state, patches, buffers)
        updates = UpdateWatch(state, patches, models, stop_after)
        trainer = TrainerWatch(state, patches, updates, loaders, buffers, files=files)
        self._watches: list[Any] = [
            models, updates, buffers, CollectiveWatch(state, patches, updates, trainer.install), loaders, DrawWatch(state, patches),
            files,
        ]  # fmt: skip
        self._launched, self._spawned = launched, 0
        for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
            for name in ("spawn", "start_processes"):
                patches.wrap(module, name, functools.partial(self._on_spawn, name))
        self._open = True
        self._dog = None if timeout_s is None else Watchdog(state, timeout_s)

    def __enter__(self) -> HostsWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> Path:
        """Stop observing, and return the file with what was seen; a second call does nothing."""
        state = self.state
        path = rank_file(state.folder, "rank", state.rank)
        if not self._open or not state.here:
            return path
        self._open = False
        self._patches.close()
        state.on_train_call.clear()
        found: dict[str, Any] = {
            "rank": state.rank, "world": state.world, "host": platform.node(), "cores": os.cpu_count(),
            "initialised": state.initialised, "spawned": self._spawned,
        }  # fmt: skip
        for watch in self._watches:
            found |= watch.facts()
        write_atomic(path, json.dumps(to_json(found)).encode())
        if self._dog is not None:
            self._dog.close()
        return path

    def _on_spawn(
        self, name: str, original: Any, fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any
    ) -> Any:
        """Count processes that the script starts, in which nobody looks unless they call `audit_hosts` themselves."""
        if self._launched and self.state.here:
            raise UsageError(
                f"the script starts {nprocs} processes itself, with torch.multiprocessing.{name}: nobody observes these, and "
                f"every one of the {self.state.world} ranks would start them again. Call {getattr(fn, '__name__', 'the function')} "
                "with int(os.environ['RANK']) in the place of spawn, as under torchrun; or call workbench.hosts.audit() at the "
                "top of that function, and start the script as always."
            )
        self._spawned += nprocs
        return original(fn, args, nprocs, *rest, **kwargs)


class CollectiveWatch:
    """When the process group begins, and which collectives join what ranks hold, in training and in evaluation (`hosts.evaluation`)."""

    def __init__(self, state: State, patches: Patches, updates: UpdateWatch, on_group: Callable[[], None]) -> None:
        self._state, self._updates, self._on_group = state, updates, on_group
        state.on_train_call.append(self._on_train_call)
        self._joined: dict[str, list[int]] = {"training": [], "evaluation": []}
        self._on_train_call(None)
        for module in (dist, distributed_c10d):
            patches.wrap(module, "init_process_group", self._on_init)
            for name in _JOINING + _OTHERS:
                patches.wrap(module, name, functools.partial(self._on_call, name))

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values."""
        return {"joined": {name: steps[:10_000] for name, steps in self._joined.items()}}

    def _begun(self) -> None:
        state = self._state
        state.initialised, state.rank, state.world = True, dist.get_rank(), dist.get_world_size()

    def _on_train_call(self, _: Any) -> None:
        """Notice a group that something else has begun, as `init_device_mesh` may."""
        if not self._state.initialised and dist.is_available() and dist.is_initialized():
            self._begun()

    def _on_init(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._state.tick("waiting in init_process_group")
        found = original(*args, **kwargs)
        self._begun()
        self._on_group()
        self._state.tick("after init_process_group")
        return found

    def _on_call(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        if name in _JOINING and not state.waits:  # all_gather_object is made of others
            self._joined["evaluation" if state.looking else "training"].append(state.step)
            if not state.looking:
                self._updates.joins()
        with state.waiting(name):
            return original(*args, **kwargs)


class FileWatch:
    """Files that are opened for writing, by Python's own audit events, and checkpoints that torch writes (`hosts.writers`, P7.2)."""

    def __init__(self, state: State, patches: Patches, buffers: BufferWatch) -> None:
        self._state, self._buffers = state, buffers
        self._files: dict[str, str] = {}
        self._busy = False
        patches.before(torch, "save", self._on_save)
        if "safetensors.torch" in sys.modules:
            patches.before(sys.modules["safetensors.torch"], "save_file", self._on_save)
        if not hasattr(sys, "_workbench_file_hook"):
            sys._workbench_file_hook = True  # type: ignore[attr-defined]
            sys.addaudithook(_hook)
        _LISTENING.append(self)
        patches.callback(_LISTENING.remove, self)

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values."""
        return {"files": [{"path": path, "kind": kind} for path, kind in self._files.items()]}

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an audit event in."""
        if event == "import":  # torch loads parts of itself on their first use, which takes seconds: no standing still
            self._state.progress += 1
        if event != "open" or self._busy or not self._state.here:
            return
        path, mode, flags = arguments[:3]
        if path is None or isinstance(path, int):
            return
        by_flags = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
        if any(c in mode for c in "wax+") if isinstance(mode, str) else by_flags:
            self._busy = True
            try:
                self.note(path, None)
            finally:
                self._busy = False

    def note(self, path: Any, kind: str | None) -> None:
        """Write down that a file is opened for writing; a `kind` of None is what its name says."""
        full = os.path.abspath(os.fsdecode(path))
        if _NEVER.search(full) or (_OWN.match(Path(full).name) and Path(full).parent == self._state.folder):
            return
        if full not in self._files:
            if len(self._files) >= MAX_FILES or os.path.isdir(full):  # where a temporary file is made
                return
            self._files[full] = "checkpoint" if _CHECKPOINT.search(full) else "log"
            if self._files[full] == "checkpoint" and kind is None:
                self._buffers.look("checkpoint")
        self._files[full] = kind or self._files[full]

    def _on_save(self, *args: Any, **kwargs: Any) -> None:
        f = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
        path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
        if isinstance(path, (str, os.PathLike)) and self._state.here:
            self._state.tick("saving")
            self._buffers.look("checkpoint")
            self.note(path, "checkpoint")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "import"):  # of hundreds a second
        for watch in _LISTENING:
            watch.heard(event, arguments)


class TrainerWatch:
    """The same facts of `workbench.Trainer`, which updates all parameters at once and by no torch optimizer; nothing of it is loaded otherwise."""

    def __init__(
        self, state: State, patches: Patches, updates: UpdateWatch, loaders: LoaderWatch, buffers: BufferWatch, *, files: FileWatch
    ) -> None:  # fmt: skip
        self._state, self._patches, self._files = state, patches, files
        self._updates, self._loaders, self._buffers = updates, loaders, buffers
        self._installed = False
        self.install()

    def install(self) -> None:
        """Begin to watch, if the trainer has been imported; it is asked again when a process group begins."""
        run = sys.modules.get("workbench.train.loop")
        if run is None or self._installed:
            return
        self._installed = True
        distributed = "workbench.train.distributed"
        self._patches.wrap(run, "Step", self._on_step)
        self._patches.before(run, "clip_by_norm", self._on_clip)
        self._patches.before(run, "Checkpoint", self._on_checkpoint)
        self._patches.before(sys.modules["workbench.train.checkpoint"], "save_file", self._on_save)
        self._patches.wrap(sys.modules["workbench.train.batches"], "_positions", self._on_positions)
        self._patches.wrap(sys.modules[f"{distributed}.process_group"].HostGroup, "sum_and_gather", self._on_sum)
        self._patches.wrap(sys.modules[f"{distributed}.data_parallel"], "evaluate_shard", self._on_shard)
        self._loaders.known.add("train")

    def _on_step(self, original: Any, *fields: Any) -> Any:
        """A step is described when its update is known and before it is made: the parameters are those before it."""
        made = original(*fields)
        if looked_at(self._state.step):
            used, norm = hash_of([made.grad]), hash_of([made.grad_norm])
            self._updates.begin(0, self._state.step, [made.params], used=used, before_clip=norm)
        self._updates.end()
        return made

    def _on_clip(self, *args: Any, **__: Any) -> None:
        limit = args[2]
        self._updates.clipped("clip_grad_norm_", limit.flatten()[0] if isinstance(limit, Tensor) else limit)

    def _on_checkpoint(self, _: int, model: Mapping[str, Tensor], *__: Any) -> None:
        mean, var = "running_mean", "running_var"
        layers = [(model[name], model[name.removesuffix(mean) + var]) for name in model if name.endswith(mean)]
        self._buffers.note(layers, "checkpoint")

    def _on_save(self, tensors: Any, filename: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - as save_file
        self._files.note(filename, "checkpoint")

    def _on_positions(self, original: Any, examples: int, config: Any, whole: int, *args: Any) -> Iterator[Tensor]:
        for order in original(examples, config, whole, *args):
            if order.shape[1] < whole:  # not the batches by which one rank knows the workload again
                self._loaders.add_order(examples, order)
            yield order

    def _on_shard(
        self, original: Any, workload: Any, model: Any, shard: int, shards: int, *, split: str, **kwargs: Any
    ) -> Any:
        data = workload.data(split)
        if not in_its_own_order(data):
            self._loaders.add_evaluation(data, range(shard, len(data), shards))
        self._loaders.known.add(split)
        try:
            return original(workload, model, shard, shards, split=split, **kwargs)
        finally:
            self._loaders.known.discard(split)

    def _on_sum(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._state.waiting("the average of the gradients"):
            return original(*args, **kwargs)
