"""The runs of a command on a Ray cluster are the runs that it has here."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.killed_programs import wait_until
from workbench.errors import UsageError
from workbench.programs.command import Command, check_command
from workbench.programs.on_ray import on_ray

pytestmark = pytest.mark.cluster
TRIAL: dict[str, Any] = {"factor": 2.0, "warmup_steps": 3, "max_grad_norm": 0.1, "stop_after": None, "seed": 5}
SCRIPT = """
import os, time, torch
w = torch.nn.Parameter(torch.randn(5))
optimizer = torch.optim.SGD([w], lr=0.1)
for k in range(20):
    optimizer.zero_grad(); ((w - torch.randn(5)) ** 2).sum().backward(); optimizer.step()
if os.path.exists(os.environ["MINE"]):
    with open(os.environ["MINE"] + ".pid", "w") as file:
        print(os.getpid(), file=file)
    time.sleep(600)
"""


def command(tmp_path: Path) -> Command:
    (tmp_path / "train.py").write_text(SCRIPT)
    return Command(words=check_command(["python", "train.py"], tmp_path), folder=tmp_path)


def test_a_run_there_is_the_run_here_until_it_is_interrupted_or_the_script_is_another_one(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    given = command(tmp_path)
    with on_ray(given, None) as there:
        monkeypatch.setenv("MINE", str(elsewhere / "waits"))
        assert there.room(None) == len(os.sched_getaffinity(0))
        here, other = given.run(elsewhere / "here", TRIAL), there.run(elsewhere / "there", TRIAL)
        for name in ("loss", "lr", "grad_norm", "clipped", "param_norm"):
            assert repr(other.columns[name]) == repr(here.columns[name])
        assert (other.code, other.updates, other.facts["updates"]) == (0, 20, 20)

        moved = dataclasses.replace(there, folder=tmp_path / "nowhere")
        with pytest.raises(UsageError, match="is not there on node"):
            moved.run(elsewhere / "moved", TRIAL)

        (elsewhere / "waits").touch()
        raised: list[BaseException] = []

        def waits() -> None:
            try:
                there.run(elsewhere / "stopped", TRIAL)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=waits)
        thread.start()
        told = elsewhere / "waits.pid"
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"), timeout_s=120.0, what="the run there")
        pid = int(told.read_text())
        there.stop()
        thread.join(60.0)
        assert (thread.is_alive(), len(raised)) == (False, 1)
        wait_until(lambda: not Path("/proc", str(pid)).exists(), timeout_s=20.0, what="the end of its process")
