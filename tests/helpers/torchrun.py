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
    target: str, *args: str | Path, hosts: int = 2, options: Sequence[str] = (), succeeds: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a module of ours, or a script, on so many processes, and fail with what was printed where it does not end as it should."""
    command = [
        sys.executable,
        "-m",
        "workbench.topics.hosts.run_rank",
        "torchrun",
        tempfile.gettempdir(),
        "--nproc-per-node",
        str(hosts),
    ]
    command += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        *options,
        *([] if target.endswith(".py") else ["-m"]),
        target,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, *map(str, args)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
    return done
