"""`python -m workbench.topics.hosts.run_rank torchrun|script|rehearsal ...`: the processes of a job that is rehearsed on this machine.

torchrun's store listens on all interfaces of the machine, whatever address it is given. What is rehearsed here concerns nobody else,
so it is given a socket that is bound to the loopback interface.
"""

from __future__ import annotations

import json
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from workbench.topics.hosts.watch import HostsWatch

LOOPBACK = "127.0.0.1"
FAILURES = "failures.json"  # in which torchrun says how ranks ended: [[rank, exit code], ...], a signal below 0


class LoopbackStore(dist.TCPStore):  # type: ignore[name-defined, misc]
    """A `torch.distributed.TCPStore` whose server, where this process is the server, listens on the loopback interface only."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False,
        timeout: timedelta = timedelta(minutes=5), **kwargs: Any,
    ) -> None:  # fmt: skip
        if is_master:
            listening = socket.socket()
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((LOOPBACK, port))
            except OSError as error:
                listening.close()
                raise RuntimeError(f"port {port} cannot be used: {error.strerror}") from error
            port = listening.getsockname()[1]
            kwargs["master_listen_fd"] = listening.detach()
        super().__init__(host_name, port, world_size, is_master, timeout, **kwargs)


def torchrun(folder: str, *words: str) -> None:
    """Run torchrun with these arguments, its store on the loopback interface, and write down how ranks failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

    for module in (static_tcp_rendezvous, c10d_rendezvous_backend):
        module.TCPStore = LoopbackStore  # type: ignore[attr-defined]
    try:
        run.main(list(words))
    except ChildFailedError as error:
        rows = [[rank, failure.exitcode] for rank, failure in error.failures.items()]
        Path(folder, FAILURES).write_text(json.dumps(rows), encoding="utf-8")
        raise


def script(folder: str, timeout_s: str, steps: str, target: str, *rest: str) -> None:
    """Run a script as `python script.py ...` would, or a module where `target` is "-m", as this rank, observed."""
    from workbench.topics.hosts.watch import HostsWatch

    most = None if steps == "-" else int(steps)
    watch = HostsWatch(Path(folder), timeout_s=float(timeout_s), stop_after=most, launched=True)
    try:
        if target == "-m":
            sys.argv = list(rest)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [target, *rest]
            sys.path[0] = str(Path(target).resolve().parent)
            runpy.run_path(target, run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            _write_error(watch, error)
        raise
    finally:
        watch.close()


def _write_error(watch: HostsWatch, error: BaseException) -> None:
    from workbench.topics.hosts.watch_state import rank_file

    state, frames = watch.state, traceback.extract_tb(error.__traceback__)
    row = {
        "rank": state.rank, "time": time.time(), "step": state.step, "phase": state.phase, "kind": type(error).__name__, "text": str(error),
        "frames": [[f.filename, f.lineno, f.name] for f in frames],
        "traceback": "".join(traceback.format_exception(error)),
    }  # fmt: skip
    rank_file(state.folder, "error", state.rank).write_text(json.dumps(row), encoding="utf-8")


def rehearsal(path: str) -> None:
    """Train a workload on this rank, on the CPU, by the trainer itself: {"workload": name, "config": fields, "out": folder of the trial}."""
    from workbench.train.trainer import Trainer
    from workbench.workloads.registry import load_workload

    spec: Mapping[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    workload = load_workload(spec["workload"])
    Trainer(device="cpu").run(workload, workload.config.replace(**spec["config"]), out=spec["out"])


if __name__ == "__main__":
    programs: list[Callable[..., None]] = [torchrun, script, rehearsal]
    next(program for program in programs if program.__name__ == sys.argv[1])(*sys.argv[2:])
