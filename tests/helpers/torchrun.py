"""Processes that train together, as torchrun starts them, on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(
    module: str,
    *args: str | Path,
    hosts: int = 2,
    options: Sequence[str] = (),
    seconds: float = 240,
    succeeds: bool = True,
) -> str:
    """Run a module of ours on so many hosts; return what was printed, or fail with it where it does not end as it should."""
    command = [
        sys.executable,
        "-m",
        "workbench.topics.hosts.run_rank",
        "torchrun",
        tempfile.gettempdir(),
        "--nproc-per-node",
        str(hosts),
    ]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", *options, "-m", module, *map(str, args)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
    return done.stdout
