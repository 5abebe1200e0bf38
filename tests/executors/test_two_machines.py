"""The commands of docs/clusters.md on two machines that have a network between them: the study is the local one, also where a machine ends in the middle."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pandas as pd
import pytest
import yaml

from tests.helpers.executors import assert_whole, begins, rates, train
from tests.helpers.machines import Machine, machines, until
from tests.helpers.workloads import small_workload
from workbench.errors import UsageError
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()
LISTED, SLURM = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
(KUBERNETES,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.partition("    #")[0] for line in LISTED.splitlines()]
HEAD, NODE, WAIT, DIAGNOSE = COMMANDS
MINE = """
import os, time, torch
import workbench as wb

class Digits(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if os.path.exists("slow"):
            time.sleep(0.001)
        return self.data[index]

def workload():
    own = wb.load_workload("digits_mlp")
    config = own.config.replace(peak_lr=3e-3, total_steps=400, eval_every_steps=50)
    return own.replace(name="mine", train_data=Digits(own.train_data), config=config)
"""


def started(text: str) -> list[str]:
    """The lines of a script that start something of Ray's or ours."""
    lines = [line.strip().removesuffix(" &") for line in text.splitlines()]
    return [line for line in lines if re.match(r"(until )?(ray|workbench) ", line)]


def test_the_recipes_start_the_commands_that_are_tested() -> None:
    service, job = yaml.safe_load_all(KUBERNETES)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert started(SLURM) == COMMANDS
    assert sorted(started(*container["args"])) == sorted(COMMANDS)
    assert {"HEAD", "CPUS"} <= {each["name"] for each in container["env"]}
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]


def test_an_address_of_an_object_store_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had become a folder `s3:` here; a copy in a store is a study again."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"s3:/.*object store.*docs/clusters\.md"):
        StudyWriter.open(Path("s3://bucket/mine"), kind="sweep", workload="w", config={})
    assert not list(tmp_path.iterdir())
    workload = small_workload()
    first, second = rates(workload.config, 0.01, 0.02)
    train(None, workload, [first], Path("mine"))
    store = fsspec.filesystem("memory")
    store.put("mine/", "bucket/mine/", recursive=True)
    store.get("bucket/mine/", "back/", recursive=True)
    assert len(train(None, workload, [first, second], Path("back"))) == 2
    assert [len(begins(Path("back"), number)) for number in (0, 1)] == [1, 1]


def assert_same_digits(here: Path, there: Path) -> None:
    """Rows are equal to the last bit, and so is what follows from them."""
    studies = StudyRecord(here), StudyRecord(there)
    times = ["seconds", "data_wait_s", "step_time_s"]
    for name in ("trials", "steps", "evals", "predictions"):
        mine, theirs = (
            getattr(study, name).drop(columns=times, errors="ignore").sort_values(by=order(name), ignore_index=True)
            for study in studies
        )
        columns = [name for name in mine if name not in ("lanes", "gradients", "gradients_reason", "note")]
        pd.testing.assert_frame_equal(mine[columns], theirs[columns], check_exact=True, obj=name)
    found = [json.loads((path / "diagnosis.json").read_text()) for path in (here, there)]
    timed = ("input.", "evaluation.")
    said = [
        {each["code"]: each["summary"] for each in one["findings"] if not each["code"].startswith(timed)}
        for one in found
    ]
    assert said[0] == said[1]


def order(name: str) -> list[str]:
    return {"trials": ["trial"], "steps": ["trial", "step"]}.get(name, ["trial", "step", "split"])


@pytest.mark.cluster
@pytest.mark.nightly
def test_a_diagnosis_on_two_machines_is_the_local_one_though_one_ends_in_the_middle(tmp_path: Path) -> None:
    """Sweep and proof, with lanes that share calls here and are alone there; the second machine ends while both train."""
    (tmp_path / "mine.py").write_text(MINE)
    own = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.fspath(ROOT),
        "OMP_NUM_THREADS": "1",
        "WORKBENCH_CACHE": os.fspath(tmp_path / "cache"),
    }
    alone = re.sub(r"--executor .*?--out runs/mine", "--out runs/alone", DIAGNOSE)
    done = subprocess.run(alone, shell=True, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    joint = own | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "HEAD": "a.train", "CPUS": "1"}
    study = tmp_path / "runs" / "mine"
    with machines(2) as (a, b):
        for machine in (a, b):
            machine.know({"a.train": a.address, "b.train": b.address})

        def start(machine: Machine, name: str, command: str) -> subprocess.Popen[bytes]:
            return machine.start(name, ["sh", "-c", f"cd {tmp_path}; {command}"], joint)

        def said() -> str:
            return "\n".join(
                f"== {log}\n{log.read_text()[-3000:]}" for each in (a, b) for log in each.folder.glob("*.log")
            )

        running = [start(a, "head", HEAD), start(b, "node", NODE)]
        (tmp_path / "slow").touch()
        running.append(start(a, "driver", f"{WAIT}\n{DIAGNOSE}"))
        try:
            until(lambda: len(nodes(study)) == 2 or running[-1].poll() is not None, said)
            time.sleep(1.0)
            b.end()
            (tmp_path / "slow").unlink()
            assert running[-1].wait(400) == 0, said()
        finally:
            for process in running:
                process.kill()
                process.wait(30)
    assert_whole(study)
    trials = StudyRecord(study).trials
    assert {"lr_sweep", "proof"} <= set(trials["stage"])
    assert any(len(begins(study, number)) > 1 for number in trials["trial"]), "no chunk lost its machine"
    assert_same_digits(tmp_path / "runs" / "alone", study)


def nodes(study: Path) -> set[str]:
    """Machines on which trials have begun."""
    folders = [path for path in (study / "trials").glob("*") if path.name.isdigit()]
    return {event["ray_node"] for path in folders for event in begins(study, int(path.name)) if "ray_node" in event}
