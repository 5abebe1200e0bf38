"""`launch`: a training job on N processes of this machine, started by torchrun, watched, and ended whatever happens."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.checks import check_integer
from workbench.errors import ClusterError, UsageError
from workbench.instruments.caller import shown
from workbench.topics.hosts.run_rank import FAILURES
from workbench.topics.hosts.watch_state import rank_file
from workbench.train.lanes.threads import cores

POLL_S = 0.1
MAX_LINES = 2000  # of a rank that are kept
END_S = 40.0  # torchrun gives its processes 30 s to end before it kills them
Frame = tuple[str, int, str]  # file, line and function
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+) in (.+)$')


def check_hosts(hosts: int) -> None:
    """Raise `UsageError` for a number of processes that leaves nothing to compare, one below 2."""
    alone = ": processes that train together. One has no other to be compared with"
    check_integer("hosts", hosts, low=2, hint=alone, error=UsageError)


def launch(
    target: Sequence[str], *, hosts: int, folder: Path, timeout_s: float = 60.0, steps: int | None = None, port: int | None = None,
    what: str = "the training",
) -> dict[str, Any]:  # fmt: skip
    """Run a script or a module (`target`, with its arguments) on `hosts` processes with the audit inside, on the loopback interface.

    Returns:
        JSON facts: hosts, cores, seconds (from the start of torchrun) and printed (first lines of each rank).
    """
    check_hosts(hosts)
    if not timeout_s > 0:
        raise UsageError(f"timeout_s={timeout_s!r} must be above 0: seconds without any progress.")
    chosen = _checked_port(port)
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("rank-*.json", "status-*.json", "stack-*.txt", "error-*.json", "failures.json", "draws-*.jsonl"):
        for path in folder.glob(pattern):
            path.unlink()
    run_rank = ["-m", "workbench.topics.hosts.run_rank"]
    command = [
        sys.executable, *run_rank, "torchrun", str(folder), "--nnodes", "1", "--nproc-per-node", str(hosts), "--max-restarts", "0",
        "--master-addr", "127.0.0.1", "--master-port", str(chosen), "--log-dir", str(folder / "logs"), "--redirects", "3",
        *run_rank, "script", str(folder), str(timeout_s), "-" if steps is None else str(steps), *target,
    ]  # fmt: skip
    began = time.perf_counter()
    with (folder / "torchrun.log").open("w", encoding="utf-8") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        job = subprocess.Popen(command, env=_environment(), start_new_session=True, **streams)
        try:
            hung = _wait(job, folder, hosts)
        finally:
            _end(job, folder, hosts)
    if hung:
        raise ClusterError(_said_of_hang(folder, hosts, timeout_s, what))
    if job.returncode:
        raise ClusterError(_said_of_death(folder, hosts, job.returncode, what))
    printed: dict[str, list[str]] = {}
    for path in sorted((folder / "logs").glob("*/attempt_0/*/stdout.log"), key=lambda p: p.stat().st_mtime):
        if path.parent.name.isdigit() and int(path.parent.name) < hosts:
            printed[path.parent.name] = path.read_text(encoding="utf-8", errors="replace").splitlines()[:MAX_LINES]
    return {"hosts": hosts, "cores": cores(), "seconds": time.perf_counter() - began, "printed": printed}


def _environment() -> dict[str, str]:
    """Return the environment of the ranks, in which this package can be imported: one thread each, on the loopback interface."""
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {**found, "GLOO_SOCKET_IFNAME": loopback[0]} if loopback else found


def _checked_port(port: int | None) -> int:
    """Return a port that can be used, a free one for None."""
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65_535):
        raise UsageError(f"port={port!r} must be an integer from 1 to 65535; leave it out for a free one.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port) if port else ("127.0.0.1", 0))
        except OSError as error:
            raise ClusterError(
                f"port={port} cannot be used ({error.strerror}): another process, perhaps an earlier training, listens there. "
                "Leave the port out for a free one, give another, or end that process."
            ) from error
        return int(probe.getsockname()[1])


def _wait(job: subprocess.Popen[bytes], folder: Path, hosts: int) -> bool:
    """Wait for the end of the job; return True where all ranks that are left stand still."""
    while job.poll() is None:
        time.sleep(POLL_S)
        left = [rank for rank in range(hosts) if _status(folder, rank)["state"] != "finished"]
        stacks = [rank_file(folder, "stack", rank) for rank in left]
        if left and all(path.exists() and path.stat().st_size > 0 for path in stacks):
            time.sleep(POLL_S)  # for the rest of the stack to be written
            return True
    return False


def _status(folder: Path, rank: int) -> dict[str, Any]:
    unknown = {"rank": rank, "state": "not started", "step": 0, "phase": "not started"}
    return dict(_json(rank_file(folder, "status", rank), unknown))


def _json(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return otherwise


def _end(job: subprocess.Popen[bytes], folder: Path, hosts: int) -> None:
    """End torchrun and its ranks, if they have not ended yet: asked first, then killed, by their own ids."""
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, END_S)):
        if job.poll() is not None:
            return
        if number == signal.SIGTERM:
            job.send_signal(number)
        for rank in range(hosts):
            _signal(_status(folder, rank), number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=seconds)
    if job.poll() is None:
        job.kill()
        job.wait()


def _signal(status: Mapping[str, Any], number: int) -> None:
    """Send a signal to a rank, if the process with its id is still that rank."""
    pid = status.get("pid")
    if status["state"] != "running" or not isinstance(pid, int):
        return
    with contextlib.suppress(OSError):
        command = Path("/proc", str(pid), "cmdline")
        if not command.parent.parent.is_dir() or b"workbench.topics.hosts.run_rank" in command.read_bytes():
            os.kill(pid, number)


def _said_of_hang(folder: Path, hosts: int, timeout_s: float, what: str) -> str:
    states = [_status(folder, rank) for rank in range(hosts)]
    left = [s for s in states if s["state"] != "finished"]
    held = [s for s in left if not str(s["phase"]).startswith(("waiting", "backward"))] or left
    guilty = [s for s in held if int(s["step"]) == min(int(s["step"]) for s in held)]
    lines = []
    for status in guilty:
        where = _shown(_own_frames(rank_file(folder, "stack", int(status["rank"])).read_text(encoding="utf-8")))
        lines.append(f"rank {status['rank']} stands still (update {status['step']}, {status['phase']}) at {where}")
    waiting = [f"rank {s['rank']} is {s['phase']}" for s in left if s not in guilty]
    finished = [str(s["rank"]) for s in states if s["state"] == "finished"]
    return (
        f"{what} hangs: for {timeout_s:g} s no rank made progress. {'; '.join(lines)}."
        + (f" Meanwhile {', '.join(waiting)}." if waiting else "")
        + (f" Finished: rank {', '.join(finished)}." if finished else "")
        + f" All stacks: {folder}/stack-*.txt. All ranks have to reach the same collectives in the same order; where a rank just "
        "needs longer, raise the time-out."
    )


def _said_of_death(folder: Path, hosts: int, code: int, what: str) -> str:
    errors = [error for rank in range(hosts) if (error := _json(rank_file(folder, "error", rank), None))]
    failed = {int(error["rank"]) for error in errors}
    for rank, number in _json(folder / FAILURES, []):  # what torchrun's own error says of each rank
        if number < 0 and rank not in failed and -number != signal.SIGTERM:  # which is torchrun's own
            name = signal.Signals(-number).name if -number in set(signal.Signals) else str(-number)
            return (
                f"{what}: rank {rank} was killed by {name}, last heard of at update {_status(folder, rank)['step']}; the other ranks were "
                f"ended. SIGKILL is often the kernel's, out of memory; what the rank printed: {folder}/logs."
            )
    if not errors:
        tail = " ".join((folder / "torchrun.log").read_text(encoding="utf-8", errors="replace").split()[-60:])
        return f"{what} could not be run: torchrun ended with {code}. It says: {tail}"
    first = min(errors, key=lambda error: float(error["time"]))
    ended = [str(r) for r in range(hosts) if r not in failed and _status(folder, r)["state"] == "finished"]
    others = f"rank {', '.join(ended)} had come to its end before" if ended else "the other ranks were ended"
    return (
        f"{what}: rank {first['rank']} died at update {first['step']} ({first['phase']}) with {first['kind']}: "
        f"{first['text'].strip()[:400]}, at {_shown(first['frames'][::-1])}; {others}. The traceback: {rank_file(folder, 'error', first['rank'])}."
    )


def _own_frames(text: str) -> list[Frame]:
    """Return the frames of the main thread, the innermost first, of what `faulthandler` writes: the main thread last."""
    blocks = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    matches = [[match for line in block.splitlines() if (match := _FRAME.match(line))] for block in blocks]
    threads = [[(m[1], int(m[2]), m[3]) for m in found] for found in matches if found]
    mains = [frames for frames in threads if frames[-1][2] == "<module>" or "runpy" in str(frames[-1:])]
    return (mains or threads or [[]])[-1]


def _shown(frames: Sequence[Sequence[Any]]) -> str:
    """Return the three innermost frames of the user's own code as `file:line function`; others where there are no such."""
    kept = [frame for frame in frames if shown(frame[0])] or list(frames)
    return " < ".join(f"{Path(file).name}:{line} {name}" for file, line, name in kept[:3]) or "an unknown place"
