"""Rehearsals: a workload, a script of somebody's own, a job with one line in it, and everything that can go wrong on the way."""

from __future__ import annotations

import copy
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import workbench as wb
from tests.helpers.host_facts import job
from tests.helpers.workloads import small_workload
from workbench import cli
from workbench.errors import ClusterError, ConfigError, UsageError
from workbench.record.read import StudyRecord
from workbench.topics.hosts import study as playbook_hosts
from workbench.topics.hosts.diagnose import CODES
from workbench.topics.hosts.launch import _own_frames as own_frames
from workbench.topics.hosts.launch import _shown as shown
from workbench.topics.hosts.launch import launch
from workbench.topics.hosts.study import HostsStudy, audit_script, read_hosts

SCRIPT = Path(__file__).parents[1] / "helpers" / "ddp_script.py"
ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    """Whether a process runs, as a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(folder: Path) -> bool:
    """Whether no process of a job is left."""
    pids = [json.loads(path.read_text())["pid"] for path in folder.glob("status-*.json")]
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(pids) and not any(alive(pid) for pid in pids)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    out = tmp_path_factory.mktemp("hosts") / "study"
    return HostsStudy(hosts=2, steps=45).run(wb.load_workload("digits_cnn"), out=out)


def test_a_bundled_workload_is_right_on_two_hosts(rehearsed: StudyRecord) -> None:
    found = wb.diagnose_hosts(rehearsed)
    assert [f.code for f in found] == list(CODES)
    assert {f.code: f.status for f in found if f.code != "hosts.straggler"} == {
        name: "ok" for name in CODES if name != "hosts.straggler"
    }
    assert set(wb.host_areas(found).values()) == {"ok"}


def test_its_facts_lie_in_the_study_and_say_what_was_trained(rehearsed: StudyRecord) -> None:
    facts = rehearsed.facts["hosts"]
    assert [r["rank"] for r in facts["ranks"]] == [0, 1]
    assert {r["steps"] for r in facts["ranks"]} == {45}
    assert sorted(path.name for path in rehearsed.path.glob("rank-*.json")) == ["rank-0.json", "rank-1.json"]
    lengths = {p["dataset"]["length"] for p in facts["ranks"][0]["passes"]}
    workload = wb.load_workload("digits_cnn")
    assert lengths == {len(workload.train_data), len(workload.validation_data)}


def test_it_is_the_training_of_one_process(rehearsed: StudyRecord, tmp_path: Path) -> None:
    """The trainer is rehearsed itself: before any update the loss of the whole first batch is that of a single process."""
    workload = wb.load_workload("digits_cnn")
    alone = wb.Trainer(device="cpu").run(workload, workload.config.replace(total_steps=2), out=tmp_path / "alone")
    trained = wb.open(rehearsed.path / "trained")
    assert len(trained.steps) == 45
    assert trained.steps["grad_norm"].notna().all()
    evaluated = [record.evals.query("step == 0 and metric == 'loss'")["value"].iloc[0] for record in (alone, trained)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)


def test_the_same_call_again_runs_nothing(rehearsed: StudyRecord) -> None:
    before = (rehearsed.path / "rank-0.json").stat().st_mtime_ns
    again = HostsStudy(hosts=2, steps=45).run(wb.load_workload("digits_cnn"), out=rehearsed.path)
    assert (rehearsed.path / "rank-0.json").stat().st_mtime_ns == before
    assert again.facts == rehearsed.facts


def test_facts_are_read_back_from_a_folder(rehearsed: StudyRecord, tmp_path: Path) -> None:
    assert read_hosts(rehearsed.path).facts["hosts"]["ranks"] == rehearsed.facts["hosts"]["ranks"]
    with pytest.raises(UsageError, match="holds no facts"):
        read_hosts(tmp_path)


@pytest.mark.slow
def test_a_script_of_ones_own_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    words = ["hosts", "--script", str(SCRIPT), "--hosts", "3", "--out", str(out), "--fail-on", "fail", "--", "healthy"]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert re.search(r"sharding +ok", said.out)
    assert "3 hosts share" in said.err or len(os.sched_getaffinity(0)) >= 3
    stored = json.loads((out / "diagnosis.json").read_text())
    assert stored["command"].endswith("-- healthy")
    by_code = {f["code"]: f["status"] for f in stored["findings"]}
    assert by_code["hosts.not_wrapped"] == by_code["hosts.sharding"] == by_code["hosts.init_seed"] == "ok"
    assert stored["areas"]["RNG"] == "ok"
    assert gone(out)


@pytest.mark.slow
def test_a_job_with_one_line_in_it(tmp_path: Path) -> None:
    """Started by torchrun alone: the audit comes from the script itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "workbench.topics.hosts.run_rank",
        "torchrun",
        "/tmp",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
    ]
    command += ["--master-port", port, str(SCRIPT), "job", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert done.stderr.count("Diagnosis of") == 1
    assert "sharding: ok" in done.stderr
    assert wb.diagnose_hosts(read_hosts(tmp_path))["hosts.not_wrapped"].status == "ok"
    assert (tmp_path / "diagnosis.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "code", "status"), [("statistics", "buffers", "warn"), ("gradients", "not_wrapped", "fail")]
)
def test_what_is_taken_out_of_the_trainer_is_missed(broken: str, code: str, status: str, tmp_path: Path) -> None:
    script = SCRIPT.with_name("broken_trainer.py")
    audit = audit_script(script, [broken, str(tmp_path / "trial")], hosts=2, out=tmp_path / "study")
    found = {f.code.removeprefix("hosts."): f.status for f in wb.diagnose_hosts(audit) if f.code != "hosts.straggler"}
    assert found == {
        name: status if name == code else "ok"
        for name in (c.removeprefix("hosts.") for c in CODES)
        if name != "straggler"
    }


@pytest.mark.slow
def test_a_script_without_a_process_group_is_told_so(tmp_path: Path) -> None:
    found = wb.diagnose_hosts(audit_script(SCRIPT, ["alone"], hosts=2, out=tmp_path / "study"))
    assert found["hosts.not_wrapped"].status == "fail"
    assert "init_process_group was never called on ranks 0 and 1" in found["hosts.not_wrapped"].summary


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_stack_and_all_are_ended(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="for 8 s no rank made progress") as error:
        audit_script(SCRIPT, ["hang"], hosts=2, timeout_s=8, out=tmp_path / "study")
    said = str(error.value)
    assert re.search(
        r"rank 1 stands still \(update 6, .*\) at ddp_script\.py:\d+ stuck < ddp_script\.py:\d+ main", said
    )
    assert "rank 0 is backward" in said
    assert "in stuck" in (tmp_path / "study" / "stack-1.txt").read_text()
    assert gone(tmp_path / "study")


@pytest.mark.slow
def test_a_rank_that_dies_shows_its_error_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match=r"rank 1 died at update 6 .* ValueError: the labels are gone, at ddp_script\.py:\d+ main"
    ):
        audit_script(SCRIPT, ["die"], hosts=2, out=tmp_path / "study")
    assert "Traceback" in json.loads((tmp_path / "study" / "error-1.json").read_text())["traceback"]
    assert gone(tmp_path / "study")


@pytest.mark.slow
def test_a_rank_that_ends_before_the_others_is_named(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0:\n    dist.barrier()\n"
    )
    with pytest.raises(
        ClusterError, match=r"rank 0 died at update 0 \(waiting in barrier\) .*; rank 1 had come to its end before"
    ):
        audit_script(script, hosts=2, out=tmp_path / "study")
    assert gone(tmp_path / "study")


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"rank 1 was killed by SIGKILL, last heard of at update \d;"):
        audit_script(SCRIPT, ["kill"], hosts=2, out=tmp_path / "study")
    assert gone(tmp_path / "study")


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port={port} cannot be used .* Leave the port out"):
            audit_script(SCRIPT, ["healthy"], hosts=2, port=port, out=tmp_path / "study")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hosts": 0}, "hosts=0 must be an integer of at least 2"),
        ({"hosts": True}, "hosts=True"),
        ({"timeout_s": 0}, "timeout_s=0 must be above 0"),
        ({"port": 70_000}, "port=70000 must be an integer from 1 to 65535"),
    ],
)
def test_settings_out_of_range(settings: dict[str, int], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        launch([str(SCRIPT), "healthy"], folder=tmp_path, **({"hosts": 2} | settings))


def test_a_script_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match=r"Did you mean 'train\.py'"):
        audit_script(tmp_path / "trian.py")
    with pytest.raises(UsageError, match="no .py files"):
        audit_script(tmp_path / "empty" / "train.py")


def test_workloads_that_cannot_be_rehearsed_say_why(tmp_path: Path) -> None:
    named = wb.load_workload("digits_mlp")
    with pytest.raises(UsageError, match="other processes cannot load it"):
        HostsStudy().run(small_workload(), out=tmp_path / "a")
    with pytest.raises(ConfigError, match="batch_size=64 .* cannot be shared out evenly among 3 hosts"):
        HostsStudy(hosts=3).run(named, out=tmp_path / "b")
    with pytest.raises(UsageError, match="must be a Workload"):
        HostsStudy().run("digits_mlp", out=tmp_path / "d")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["digits_mlp", "digits_cnn"]])
def test_the_command_needs_one_workload(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hosts", *words]) == 2
    assert "needs one WORKLOAD, or --script FILE" in capsys.readouterr().err


@pytest.mark.parametrize("target", [["digits_mlp"], ["--script", str(SCRIPT)]])
def test_one_host_is_no_rehearsal(target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hosts", *target, "--hosts", "1", "--out", str(tmp_path / "study")]) == 2
    assert "hosts=1 must be an integer of at least 2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("good", [True, False])
def test_the_command_prints_what_to_do_about_what_is_wrong(
    good: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = copy.deepcopy(job())
    if not good:
        for rank in seen.facts["hosts"]["ranks"]:
            rank["joined"]["evaluation"] = []
    found = replace(wb.diagnose_hosts(seen), path=tmp_path, cost={"hosts": 2, "seconds": 1.0})
    monkeypatch.setattr(playbook_hosts, "rehearse", lambda *_, **__: (found, wb.host_areas(found)))
    assert cli.main(["hosts", "mine", "--hosts", "2", "--fail-on", "warn"]) == (0 if good else 3)
    said = capsys.readouterr().out
    assert ("\n- Join sums and counts of all hosts with all_reduce" in said) != good


STACK = """Timeout (0:00:08)!
Thread 0x00007f01 (most recent call first):
  File "/lib/python3.11/threading.py", line 331 in wait
  File "/site-packages/workbench/topics/hosts/watch_state.py", line 60 in _watch
  File "/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f02 (most recent call first):
  File "/site-packages/torch/utils/data/dataloader.py", line 720 in __next__
  File "/home/me/data.py", line 12 in fetch
  File "/home/me/train.py", line 41 in main
  File "/home/me/train.py", line 90 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_stack_of_the_main_thread_is_found_and_the_users_own_frames_are_shown() -> None:
    assert shown(own_frames(STACK)) == "data.py:12 fetch < train.py:41 main < train.py:90 <module>"
    assert shown(own_frames("")) == "an unknown place"
    assert shown([(selectors.__file__, 415, "select"), ("/home/me/train.py", 7, "main")]) == "train.py:7 main"
    assert shown([("/site-packages/torch/x.py", 3, "f")]) == "x.py:3 f"
