"""The process that has imported what a program imports, and forks a child for each run: the child is the program from its first line on.

Nothing of torch has run here but its import: no tensor is computed, no thread pool begun, no accelerator touched.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOM = "WORKBENCH_LATER"
"""Variable whose room in the environment of the system becomes that of WORKBENCH_TRIAL in each child: the processes of a run are known by it. As long a name."""
READY = "ready"
PID = b"pid "
"""Before the number of a process that was forked, which its exit code must not be taken for."""
_HARMLESS = {"jemalloc_bg_thd"}
"""Threads that survive a fork of their own accord."""


def serve() -> Callable[[], None]:
    """Import what is told, then fork for each request; return in the child only, with what runs the program."""
    server = socket.socket(fileno=int(sys.argv[1]))
    start = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    sys.path[0] = start["path"]
    try:
        observed, why = _imported(start)
    except Exception as error:
        observed, why = None, f"what it imports cannot be imported beforehand ({type(error).__name__}: {error})"
    server.send((why or READY).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while not why:
        request, streams, *_ = socket.recv_fds(server, 1 << 16, 4)
        if not request:
            break
        if not os.fork():
            server.close()
            if (run := _keep(json.loads(request), streams, observed, start)) is not None:
                return run
        for stream in streams:
            os.close(stream)
    os._exit(0)


def _keep(given: Mapping[str, Any], streams: Sequence[int], observed: Any, start: Mapping[str, Any]) -> Callable[[], None] | None:  # fmt: skip
    """Fork the program itself, and tell its process and, at its end, its exit code to whoever asked."""
    asked = socket.socket(fileno=streams[0])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        for stream in streams[1:]:
            os.close(stream)
        with contextlib.suppress(OSError):
            asked.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    os.setsid()
    for stream, number in zip((*streams[1:], streams[2]), (0, 1, 2), strict=True):
        os.dup2(stream, number)
    for stream in streams[1:]:
        os.close(stream)
    os.chdir(given["folder"])
    for variable, value in start["own"].items():
        os.environ.pop(variable, None)
        os.environ.update({variable: value} if value is not None else {})
    _name(given["trial"])
    asked.send(PID + str(os.getpid()).encode())
    asked.close()
    return _program(given, observed, start)


def _program(given: Mapping[str, Any], observed: Any, start: Mapping[str, Any]) -> Callable[[], None]:
    """Return what runs a script or a module as `python` does; observed from where it imports torch on, as everywhere."""
    from workbench.programs.guard import begin as begin_to_guard

    trial = json.loads(Path(given["trial"]).read_text(encoding="utf-8"))
    begin_to_guard(trial)
    _when_imported({"torch", *start["packages"]}, lambda: observed.start(trial))
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    words = given["words"][1:]
    sys.orig_argv = given["words"]
    sys.argv = words if words[0] != "-m" else ["-m", *words[2:]]
    script = os.path.abspath(words[0])
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=None)
    sys.modules["__main__"] = main
    sys.path[sys.path.index(start["path"])] = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(script))  # fmt: skip
    if words[0] == "-m":
        return lambda: runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    main.__dict__.update(__file__=script, __cached__=None, __loader__=SourceFileLoader("__main__", script))
    return lambda: exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)


def _when_imported(packages: set[str], begin: Callable[[], None]) -> None:
    """Call `begin` at the first import statement of one of these packages, which are imported already."""
    original = builtins.__import__

    def watched(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and name.partition(".")[0] in packages and builtins.__import__ is watched:
            builtins.__import__ = original
            begin()
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = watched


def _name(trial: str) -> None:
    """Have the system know this process, and those that it forks, by its run."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(ROOM.encode())
    ctypes.memmove(
        place - len(ROOM) - 1, f"WORKBENCH_TRIAL={trial}\0".encode(), len(os.fsencode(trial)) + len(ROOM) + 2
    )
    os.environ.pop(ROOM)
    os.environ["WORKBENCH_TRIAL"] = trial


def _imported(start: Mapping[str, Any]) -> tuple[Any, str]:
    """Import in this order; return the observer, which begins when torch is there as in any other run, and why no child can be like such a run, "" where one can."""
    from workbench.programs.seeds import set_seeds, states

    observed, before, drawn, torch_before = None, {}, {}, b""  # type: Any, dict[str, str], dict[str, int], bytes
    for name, path, place in start["modules"]:
        found = importlib.import_module(name)
        if getattr(found, "__file__", None) != path:
            return None, f"{name} is imported from another place there"
        if name == "torch":
            from workbench.programs.child import Observed

            observed = Observed()
            observed.install()
            set_seeds(0)
            before, torch_before = states(), _torch_state()
        if before and (now := states()) != before:
            drawn |= {module: place for module in now if now[module] != before[module]}
            before = now
    # what an import has drawn tells where a generator was not seeded anew since, and where it is used at all
    told = any(
        start["states"].get(module) != before[module] and start["reseeded"].get(module, 0) <= place
        for module, place in drawn.items()
    )
    if told or _torch_state() != torch_before:
        return None, "a library draws random numbers when it is imported"
    return observed, _unfit()


def _torch_state() -> bytes:
    import torch

    return torch.get_rng_state().numpy().tobytes()


def _unfit() -> str:
    """Return why this process is not to be forked, "" where it may be."""
    import torch

    from workbench.instruments.caller import shown

    for module in tuple(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and os.path.isabs(path) and shown(path) is not None:
            return f"a library imports {os.path.basename(path)}, which is not installed"
    pid = os.fork()  # has the thread pools of BLAS ended, which know of forks
    if not pid:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    if os.waitpid(pid, 0)[1]:
        return "a library initialises CUDA when it is imported"
    threads = {Path(task, "comm").read_text(encoding="utf-8").strip() for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())}  # fmt: skip
    if threading.active_count() > 1 or threads - _HARMLESS:
        return "a library starts a thread when it is imported"
    return ""
