"""The same command gives the same diagnosis: under clocks that run fast or backwards bit for bit but for times, with two threads in every verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import workbench as wb

CLOCK = """
import os, time
speed = float(os.environ["CLOCK"])
for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
    real, real_ns = getattr(time, name), getattr(time, name + "_ns")
    setattr(time, name, lambda real=real, began=real(): began + speed * (real() - began))
    setattr(time, name + "_ns", lambda real=real_ns, began=real_ns(): began + int(speed * (real() - began)))
"""
TIMED = {"input.bound"}
"""Findings about time itself."""


def diagnosed(folder: Path, *, clock: float = 1.0, threads: int = 1) -> tuple[pd.DataFrame, list[tuple[object, ...]]]:
    """Return the losses of all updates of a diagnosis, and its findings."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK)
    path = os.pathsep.join([os.fspath(folder), str(Path(__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "CLOCK": str(clock), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "workbench", "diagnose", "valley", "--budget", "2x", "--out", "study"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / "study" / "diagnosis.json").read_text())["findings"]
    found = [(f["code"], f["status"], f["value"], f["step"]) for f in told if f["code"] not in TIMED]
    return wb.open(folder / "study").steps[["trial", "step", "loss"]], sorted(found, key=str)


@pytest.mark.slow
def test_neither_a_clock_nor_threads_change_what_is_found(tmp_path: Path) -> None:
    losses, found = diagnosed(tmp_path / "once")
    assert len(found) > 50
    assert len(losses) > 400
    for name, clock in (("fast", 200.0), ("backwards", -1.0)):
        again, findings = diagnosed(tmp_path / name, clock=clock)
        pd.testing.assert_frame_equal(again, losses, check_exact=True)
        assert findings == found
    again, findings = diagnosed(tmp_path / "threads", threads=2)
    pd.testing.assert_frame_equal(again, losses, rtol=1e-3)
    assert [finding[:2] for finding in findings] == [finding[:2] for finding in found]
