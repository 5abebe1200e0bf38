"""`kill -9` at 20 random moments: the N best on disk are the N best so far, and nothing partial is ever selected (P4.2, P4.4)."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.workloads import small_net, small_workload
from workbench.record.read import TrialRecord, open_record, select_best
from workbench.train import checkpoint as checkpoint_store
from workbench.train.checkpoint import best_steps, load_checkpoint
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload

KEEP, KILLS = 3, 20


def workload() -> Workload:
    """Evaluated at every step, and a metric that goes up and down: the best changes all the time."""
    return small_workload(
        build_model=lambda: small_net(0.3),
        config={"total_steps": 240, "eval_every_steps": 1, "keep_best": KEEP, "peak_lr": 0.3},
    )


def train(folder: Path) -> None:
    checkpoint_store.WRITE_SECONDS = -1.0  # every checkpoint goes to the disk at once
    Trainer(gradients="loop").run(workload(), out=folder)


@contextlib.contextmanager
def child(folder: Path) -> Iterator[int]:
    """A forked process that trains; it has everything imported, so that a kill hits training and not the imports."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
            train(folder)
            status = 0
        os._exit(status)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def look(folder: Path) -> int:
    """Hold what a killed process left to the promise; return its latest checkpoint, -1 where there is none."""
    if not (folder / "trials" / "0" / "config.json").exists():
        return -1
    record = open_record(folder)
    assert isinstance(record, TrialRecord)
    there = {int(path.name.removeprefix("step-")): load_checkpoint(path) for path in record.checkpoints}
    assert all(step == checkpoint.step for step, checkpoint in there.items()), "every one of them is whole"
    if not there:
        return -1
    rows = record.evals[(record.evals["metric"] == "loss") & (record.evals["split"] == "validation")]
    so_far = {int(s): float(v) for s, v in zip(rows["step"], rows["value"], strict=True) if s <= max(there)}
    assert set(range(max(there) + 1)) == set(so_far), "what was evaluated up to the latest checkpoint is known"
    assert set(best_steps(so_far, KEEP, mode="min")) <= set(there)
    assert len(there) <= KEEP + 3, "at most the one being written and those about to be deleted are there beside them"
    chosen = record.best()
    assert math.isfinite(chosen.value)
    if chosen.checkpoint is not None:
        assert chosen.step in there
    else:
        assert chosen.step > max(there), "only an evaluation whose checkpoint was not yet written has none"
    return max(there)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_n_best_survive_twenty_kills(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    draw = random.Random(0)
    folder, reached, killed = tmp_path / "killed", [-1], 0
    while killed < KILLS:
        with child(folder) as pid:
            begun = reached[-1]
            until, wait = begun + draw.randint(1, 10), draw.uniform(0.0, 0.02)
            deadline = time.monotonic() + 60
            while _latest(folder) < until and time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
            time.sleep(wait)  # anywhere between two checkpoints, or within one
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            break
        assert os.WIFSIGNALED(status)
        killed += 1
        reached.append(look(folder))
        assert reached[-1] >= begun, "nothing that was there is lost"
    assert killed == KILLS, "the run is long enough for all of them"
    assert len(set(reached)) > 5, "they hit different moments"
    (folder / "trials" / "0" / "checkpoints" / ".step-00000001.99999999.tmp").mkdir()
    train(folder)
    assert not [*folder.rglob("*.tmp"), *folder.rglob("*.old")], "what the killed ones were writing is swept"
    train(tmp_path / "whole")
    again, whole = (open_record(tmp_path / name) for name in ("killed", "whole"))
    assert isinstance(again, TrialRecord)
    assert isinstance(whole, TrialRecord)
    assert again.steps["loss"].tolist() == whole.steps["loss"].tolist()
    assert [p.name for p in again.checkpoints] == [p.name for p in whole.checkpoints]
    values = whole.evals[whole.evals["metric"] == "loss"]
    assert again.best()[:2] == select_best(values["step"].tolist(), values["value"].tolist(), mode="min")


def _latest(folder: Path) -> int:
    return max((int(p.name.removeprefix("step-")) for p in folder.glob("trials/0/checkpoints/step-*")), default=-1)
