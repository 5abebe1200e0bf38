"""`on_ray`: the runs of a command as processes on the machines of a Ray cluster, one task each."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from workbench.errors import ClusterError, UsageError
from workbench.programs.command import Command, Outcome
from workbench.ray.cluster import Calls, RayCluster, WorkerLost, node_of_this_worker
from workbench.ray.folders import temporary_folder
from workbench.train.batches import resolve_device

RERUNS = 3
"""Workers that one run may lose (rule of thumb)."""
END_S = 20.0
"""What an interrupted run may take to end its processes, before its worker is killed (rule of thumb)."""
ASK_S = 0.5
"""How often a run asks whether it is interrupted."""
_GIVEN = [f.name for f in fields(Command) if f.compare]
_THERE: dict[str, Command] = {}  # of this process of the cluster: from its second run on a command forks


@dataclass(frozen=True, kw_only=True)
class RayCommand(Command):
    """A command whose runs are on a cluster, with its folder under the same path on every machine.

    Attributes:
        gpus: that each run takes, beside as many CPUs as it has threads, one where that is left to it.
        interrupt: an event of the whole cluster. `ray.cancel` of a task whose answer is under way ends this process (Ray 2.60).
        calls: runs that are under way.
    """

    cluster: RayCluster = field(compare=False, repr=False)
    gpus: int = field(compare=False)
    interrupt: Calls = field(compare=False, repr=False)
    calls: dict[Any, threading.Event] = field(default_factory=dict, compare=False, repr=False)

    def room(self, threads: int | None) -> int:
        """Return how many runs the cluster has room for.

        Raises:
            ClusterError: for none.
        """
        wanted, name = (self.gpus, "GPU") if self.gpus else (threads or 1, "CPU")
        room = sum(count // wanted for count in self.cluster.machines(name))
        if not room:
            raise ClusterError(f"no machine of the Ray cluster has the {wanted} {name} that a run takes: give fewer --threads, or start one that has.")  # fmt: skip
        return room

    def run(self, scratch: Path, trial: Mapping[str, Any], *, threads: int | None = None) -> Outcome:  # noqa: ARG002
        """Run it once on some machine, in a temporary folder there; again on another where its worker is lost."""
        given = {name: getattr(self, name) for name in _GIVEN}
        here = {"code": self.settings["code"], "python": sys.executable, "variables": dict(os.environ)}
        for _ in range(1 + RERUNS):
            if self.stopped.is_set():
                raise KeyboardInterrupt
            call = self.cluster.submit(run_there, given, here, dict(trial), threads, self.interrupt, cpus=threads or 1, gpus=self.gpus)  # fmt: skip
            ended = self.calls[call] = threading.Event()
            try:
                if self.stopped.is_set():
                    raise KeyboardInterrupt
                found: Outcome = self.cluster.answer(call)
                return found
            except WorkerLost as error:
                lost = error
            except KeyboardInterrupt:
                with contextlib.suppress(WorkerLost):
                    self.interrupt.set()
                    self.cluster.ready([call], END_S)
                raise
            finally:
                ended.set()
                self.calls.pop(call)
        raise ClusterError(
            f"a run of `{self.shown}` lost its worker {1 + RERUNS} times (the last one: {lost}). A worker that is killed again and again is often out of "
            "memory; one that cannot start has other versions of Python, Ray or this package than this machine."
        )

    def stop(self) -> None:
        """End the runs that are under way, with all that they started, and begin no other one."""
        super().stop()
        with contextlib.suppress(WorkerLost):
            self.interrupt.set()
        until = time.monotonic() + END_S
        for call, ended in dict(self.calls).items():
            if not ended.wait(max(until - time.monotonic(), 0.0)):
                self.cluster.cancel(call)


@contextlib.contextmanager
def on_ray(command: Command, address: str | None) -> Iterator[RayCommand]:
    """Yield a command that runs on the cluster at `address`, None is one of this machine's that ends with it."""
    cluster = RayCluster.connect(address)
    try:
        gpus, interrupt = int(resolve_device("auto").type == "cuda"), cluster.begin(threading.Event)
        yield RayCommand(**{name: getattr(command, name) for name in _GIVEN}, cluster=cluster, gpus=gpus, interrupt=interrupt)  # fmt: skip
    finally:
        cluster.close()


def run_there(given: Mapping[str, Any], here: Mapping[str, Any], trial: Mapping[str, Any], threads: int | None, interrupt: Any) -> Outcome:  # fmt: skip
    """Run a command once in this process of the cluster, with the variables of the machine where it was given that this one lacks."""
    os.environ.update({name: value for name, value in here["variables"].items() if name not in os.environ})
    place = Path(given["folder"])
    words = tuple(sys.executable if word == here["python"] else word for word in given["words"])
    key = repr((given, here["code"]))
    command = _THERE.setdefault(key, Command(**{**given, "words": words}))
    if not place.is_dir() or command.settings["code"] != here["code"]:
        missing = "is not there" if not place.is_dir() else "holds another script"
        raise UsageError(
            f"{place} {missing} on node {node_of_this_worker()[:8]} of the Ray cluster: the folder with the script has to be shared by all machines, under the same path."
        )
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(ASK_S):
            with contextlib.suppress(WorkerLost):  # who asked for the run is gone: it ends, too
                if not interrupt.is_set():
                    continue
            _THERE.pop(key, None)
            return command.stop()

    threading.Thread(target=ask, daemon=True).start()
    try:
        with temporary_folder() as scratch:
            return command.run(Path(scratch, "0"), trial, threads=threads)
    finally:
        ended.set()
