"""Jobs on this machine: a workload, a script of one's own, a job with one line in it, planted bugs, and everything that can go wrong; and their figures."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import re
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import workbench as wb
from tests.helpers.host_facts import job
from tests.helpers.ordinary_scripts import PLANTED, SCRIPTS, WRONG, facts_of
from tests.helpers.planted_hosts import BUGS
from tests.helpers.torchrun import torchrun
from tests.helpers.workloads import small_workload
from workbench import cli
from workbench.errors import ClusterError, ConfigError, DataError, UsageError
from workbench.findings.audited import Audit
from workbench.plots.style import BAD, BASELINE, GOOD, why_not_measured
from workbench.record.read import StudyRecord
from workbench.topics.hosts import study as hosts_study
from workbench.topics.hosts.diagnose import AREAS
from workbench.topics.hosts.diagnose_update import CODES
from workbench.topics.hosts.launch import launch
from workbench.topics.hosts.run_rank import LoopbackStore

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "ddp_script.py"
BUT_STRAGGLER = [code for code in CODES if code != "hosts.straggler"]
"""How long a host is busy on a machine that others use as well is chance: stragglers are judged where one is planted."""


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
    return wb.hosts.Study(hosts=2, steps=45).run(wb.load_workload("digits_cnn"), out=out)


def test_a_bundled_workload_is_right_on_two_hosts(rehearsed: StudyRecord) -> None:
    found = wb.hosts.diagnose(rehearsed)
    assert [f.code for f in found] == list(CODES)
    assert {code: found[code].status for code in BUT_STRAGGLER} == dict.fromkeys(BUT_STRAGGLER, "ok")
    assert set(wb.hosts.areas(found).values()) == {"ok"}
    assert found["hosts.checkpoint_writers"].value == 1, "the trainer's own checkpoints are seen"


def test_the_study_is_the_training_of_one_process_with_its_facts_in_the_folder(
    rehearsed: StudyRecord, tmp_path: Path
) -> None:
    """The trainer is rehearsed itself: before any update the loss of the whole first batch is that of a single process."""
    ranks, workload = rehearsed.facts["hosts"]["ranks"], wb.load_workload("digits_cnn")
    assert [(r["rank"], r["steps"]) for r in ranks] == [(0, 45), (1, 45)]
    lengths = {p["dataset"]["length"] for p in ranks[0]["passes"]}
    assert lengths == {len(workload.train_data), len(workload.validation_data)}
    alone = wb.Trainer(device="cpu").run(workload, workload.config.replace(total_steps=2), out=tmp_path / "alone")
    trained = wb.open(rehearsed.path / "trained")
    assert len(trained.steps) == 45
    evaluated = [record.evals.query("step == 0 and metric == 'loss'")["value"].iloc[0] for record in (alone, trained)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)
    before = (rehearsed.path / "rank-0.json").stat().st_mtime_ns
    again = wb.hosts.Study(hosts=2, steps=45).run(workload, out=rehearsed.path)
    assert (rehearsed.path / "rank-0.json").stat().st_mtime_ns == before, "the same call again runs nothing"
    assert again.facts == rehearsed.facts
    assert wb.hosts.read(rehearsed.path).facts["hosts"]["ranks"] == ranks
    with pytest.raises(UsageError, match="holds no facts"):
        wb.hosts.read(tmp_path / "empty")


# Planted bugs, and scripts as people write them.

EXPECTED = {
    "healthy": ("", None), "init_seed": ("init_seed", "RNG"), "data_seed": ("data_seed", "RNG"), "overlap": ("sharding", "sharding"),
    "incomplete": ("sharding", "sharding"), "no_set_epoch": ("set_epoch", "RNG"), "logs": ("writers", "logging"),
    "checkpoints": ("checkpoint_writers", "checkpointing"), "buffers": ("buffers", "evaluation"), "padded": ("evaluation", "evaluation"),
    "own_part": ("evaluation", "evaluation"), "clip": ("clip", None), "slow": ("straggler", None), "raw_module": ("not_wrapped", None),
}  # fmt: skip
"""Bug: the one code that is not ok, and the one area."""


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
def test_each_planted_bug_flips_its_own_verdict_alone(hosts: int, tmp_path: Path) -> None:
    assert list(EXPECTED) == ["healthy", *BUGS]
    launch(["-m", "tests.helpers.planted_hosts", str(tmp_path), *EXPECTED], hosts=hosts, folder=tmp_path / "job")
    for bug, (code, area) in EXPECTED.items():
        found = wb.hosts.diagnose(wb.hosts.read(tmp_path / bug))
        codes = {f.code.removeprefix("hosts.") for f in found if f.status != "ok"}
        assert codes - ({"straggler"} - {code}) == ({code} if code else set()), bug
        areas = wb.hosts.areas(found)
        assert {name for name in AREAS if areas[name] != "ok"} == ({area} if area else set()), bug


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    launch(["-m", "tests.helpers.ordinary_scripts", str(folder)], hosts=2, folder=folder / "job", timeout_s=120)
    return folder


@pytest.mark.parametrize("bug", PLANTED)
def test_what_no_such_script_shows_is_planted_beside_them(ordinary: Path, bug: str) -> None:
    found = wb.hosts.diagnose(wb.hosts.read(facts_of(ordinary, "planted", bug)))
    code = f"hosts.{EXPECTED[bug][0]}"
    assert {c for c in (*BUT_STRAGGLER, code) if found[c].status != "ok"} == {code}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_right_script_raises_no_alarm_and_its_bug_flips_one_verdict_alone(ordinary: Path, name: str) -> None:
    """What a short training without an evaluation, or with a sampler that has no epochs, does not show is no alarm."""
    for buggy in (False, True):
        found = wb.hosts.diagnose(wb.hosts.read(facts_of(ordinary, name, WRONG * buggy)))
        statuses = {code.removeprefix("hosts."): found[code].status for code in BUT_STRAGGLER}
        unseen = {code for code in ("evaluation", "set_epoch") if statuses[code] == "not_measured"}
        alarms = {code: status for code, status in statuses.items() if status != "ok" and code not in unseen}
        assert list(alarms) == ([SCRIPTS[name][1]] if buggy else []), repr(found)
        assert set(alarms.values()) <= {"warn", "fail"}
    measured = {"averaged copy": "evaluation", "windows": "evaluation", "stream": "sharding", "phases": "init_seed"}
    right = wb.hosts.diagnose(wb.hosts.read(facts_of(ordinary, name)))
    assert name not in measured or right[f"hosts.{measured[name]}"].status == "ok"


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
    done = torchrun(str(SCRIPT), "job", tmp_path)
    assert "done" in done.stdout
    assert done.stderr.count("Diagnosis of") == 1
    assert "sharding: ok" in done.stderr
    assert wb.hosts.diagnose(wb.hosts.read(tmp_path))["hosts.not_wrapped"].status == "ok"
    assert (tmp_path / "diagnosis.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "code"), [("statistics", "buffers"), ("gradients", "not_wrapped")])
def test_what_is_taken_out_of_the_trainer_is_missed(broken: str, code: str, tmp_path: Path) -> None:
    script = SCRIPT.with_name("broken_trainer.py")
    audit = wb.hosts.audit_script(script, [broken, str(tmp_path / "trial")], hosts=2, out=tmp_path / "study")
    found = wb.hosts.diagnose(audit)
    assert {c for c in BUT_STRAGGLER if found[c].status != "ok"} == {f"hosts.{code}"}


# What goes wrong.

LEAVES = (
    "import torch.distributed as dist\ndist.init_process_group('gloo')\nif dist.get_rank() == 0:\n    dist.barrier()\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hang", r"for 8 s no rank made progress.*rank 1 stands still \(update 6, .*\) at ddp_script\.py:\d+ stuck < ddp_script\.py:\d+ main.*rank 0 is backward"),
        ("die", r"rank 1 died at update 6 .* ValueError: the labels are gone, at ddp_script\.py:\d+ main"),
        ("kill", r"rank 1 was killed by SIGKILL, last heard of at update \d;"),
        ("leave", r"rank 0 died at update 0 \(waiting in barrier\) .*; rank 1 had come to its end before"),
    ],
)  # fmt: skip
def test_a_rank_that_goes_wrong_is_named_and_all_are_ended(how: str, said: str, tmp_path: Path) -> None:
    script = SCRIPT
    if how == "leave":
        script = tmp_path / "leaves.py"
        script.write_text(LEAVES)
    with pytest.raises(ClusterError, match=said):
        wb.hosts.audit_script(script, [how], hosts=2, timeout_s=8 if how == "hang" else 60, out=tmp_path / "study")
    assert gone(tmp_path / "study")
    if how == "hang":
        assert "in stuck" in (tmp_path / "study" / "stack-1.txt").read_text()
    if how == "die":
        assert "Traceback" in json.loads((tmp_path / "study" / "error-1.json").read_text())["traceback"]


def test_what_cannot_be_run_says_why_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    named, out = wb.load_workload("digits_mlp"), tmp_path / "study"

    def run(**settings: Any) -> Any:
        return launch([str(SCRIPT), "healthy"], folder=out, **({"hosts": 2} | settings))

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port={port} cannot be used .* Leave the port out"):
            wb.hosts.audit_script(SCRIPT, ["healthy"], hosts=2, port=port, out=tmp_path / "taken")
        with pytest.raises(RuntimeError, match="cannot be used"):
            LoopbackStore("127.0.0.1", port, None, True)
    for call, error, said in (
        (lambda: run(hosts=0), UsageError, "hosts=0 must be an integer of at least 2"),
        (lambda: run(hosts=True), UsageError, "hosts=True"),
        (lambda: run(timeout_s=0), UsageError, "timeout_s=0 must be above 0"),
        (lambda: run(port=70_000), UsageError, "port=70000 must be an integer from 1 to 65535"),
        (lambda: wb.hosts.audit_script(tmp_path / "trian.py"), UsageError, r"Did you mean 'train\.py'"),
        (lambda: wb.hosts.audit_script(tmp_path / "empty" / "train.py"), UsageError, "no .py files"),
        (lambda: wb.hosts.Study().run(small_workload(), out=out), UsageError, "other processes cannot load it"),
        (lambda: wb.hosts.Study(hosts=3).run(named, out=out), ConfigError, "batch_size=64 .* cannot be shared out evenly among 3 ranks"),
        (lambda: wb.hosts.Study().run("digits_mlp", out=out), UsageError, "must be a Workload"),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(error, match=said):
            call()
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs one WORKLOAD, or --script FILE"),
        (["digits_mlp", "digits_cnn"], "needs one WORKLOAD"),
        (["digits_mlp", "--hosts", "1"], "hosts=1 must be an integer of at least 2"),
        (["--script", str(SCRIPT), "--hosts", "1"], "hosts=1 must be an integer of at least 2"),
    ],
)
def test_the_command_refuses(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hosts", *words, "--out", str(tmp_path / "study")]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("good", [True, False])
def test_the_command_prints_what_to_do_about_what_is_wrong(
    good: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = copy.deepcopy(job())
    if not good:
        for rank in seen.facts["hosts"]["ranks"]:
            rank["joined"]["evaluation"] = []
    found = replace(wb.hosts.diagnose(seen), path=tmp_path, cost={"hosts": 2, "seconds": 1.0})
    monkeypatch.setattr(hosts_study, "rehearse", lambda *_, **__: (found, wb.hosts.areas(found)))
    assert cli.main(["hosts", "mine", "--hosts", "2", "--fail-on", "warn"]) == (0 if good else 3)
    said = capsys.readouterr().out
    assert ("\n1. Join sums and counts of all ranks with all_reduce" in said) != good


# Who listens where: what is rehearsed on this machine cannot be reached from another one.

TABLES = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]


LISTENS = """
import os, pathlib
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
own = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
for table in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        words = line.split()
        address, port = words[1].split(":")
        if words[3] == "0A" and (int(words[9]) in own or int(port, 16) == int(os.environ["MASTER_PORT"])):
            print("listens", address, "store" if int(words[9]) not in own else "own")
dist.barrier()
dist.destroy_process_group()
"""


only_linux = pytest.mark.skipif(not TABLES[0].exists(), reason="only Linux shows who listens")


def listening(port: int) -> set[str]:
    """The local addresses, in hexadecimal, on which somebody listens at a port."""
    rows = [line.split() for table in TABLES if table.exists() for line in table.read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


@only_linux
def test_a_store_listens_on_the_loopback_interface_alone_and_works() -> None:
    server = LoopbackStore("127.0.0.1", 0, None, True, timedelta(seconds=20), multi_tenant=True)
    assert listening(server.port) == {"0100007F"}
    client = LoopbackStore("127.0.0.1", server.port, None, False, timedelta(seconds=20))
    client.set("key", "value")
    assert server.get("key") == b"value"


@only_linux
@pytest.mark.slow
def test_nothing_of_a_job_listens_elsewhere(tmp_path: Path) -> None:
    script = tmp_path / "listens.py"
    script.write_text(LISTENS)
    printed = launch([str(script)], hosts=2, folder=tmp_path / "job")["printed"]
    for lines in printed.values():
        found = [line.split()[1:] for line in lines if line.startswith("listens")]
        assert {address for address, _ in found} == {"0100007F"}
        assert {whose for _, whose in found} == {"own", "store"}


# Files shared out.

RECORD = 4096


def files(folder: Path, sizes: list[int]) -> list[Path]:
    found = [folder / f"part-{number:02d}.bin" for number in range(len(sizes))]
    for path, size in zip(found, sizes, strict=True):
        path.write_bytes(bytes(size))
    return found


def loads(shares: list[list[Path]]) -> list[int]:
    return sorted(sum(p.stat().st_size for p in share) for share in shares)


@pytest.mark.parametrize("hosts", [1, 3, 8])
def test_shares_are_disjoint_complete_and_even(hosts: int, tmp_path: Path) -> None:
    sizes = [int(s) for s in np.random.default_rng(hosts).integers(0, 5000, 23)]
    paths = files(tmp_path, sizes)
    shares = wb.hosts.shard_files(paths, hosts)
    assert sorted(itertools.chain(*shares)) == sorted(paths)
    assert loads(shares)[-1] <= sum(sizes) / hosts + max(sizes)
    assert wb.hosts.shard_files(random.Random(0).sample(paths, 23), hosts) == shares, "whatever the order of the paths"
    few = files(tmp_path, [4, 3, 3, 2])
    assert loads(wb.hosts.shard_files(few, 2)) == [6, 6]


def test_bad_input_is_named(tmp_path: Path) -> None:
    paths = files(tmp_path, [1, 2])
    with pytest.raises(DataError, match="2 files are too few for 3 hosts"):
        wb.hosts.shard_files(paths, 3)
    with pytest.raises(DataError, match="no file .*missing"):
        wb.hosts.shard_files([*paths, tmp_path / "missing.bin"], 2)
    with pytest.raises(UsageError, match="holds a file twice"):
        wb.hosts.shard_files([paths[0], paths[0]], 1)
    with pytest.raises(UsageError, match="hosts=0"):
        wb.hosts.shard_files(paths, 0)


def test_each_byte_is_read_once_where_files_are_shared_out_and_by_every_rank_where_not(tmp_path: Path) -> None:
    paths = files(tmp_path, [RECORD * n for n in (5, 9, 2, 4)])
    table = wb.hosts.measure_file_shards(paths, hosts=2)
    own, every = (table[table["files"] == way] for way in ("sharded", "all"))
    assert own["bytes_read"].sum() == RECORD * 20
    assert every["bytes_read"].tolist() == [RECORD * 20] * 2
    assert own["examples"].sum() == every["examples"].sum() == 20
    assert every["examples"].tolist() == [10, 10]


# Figures.


def blank() -> Axes:
    return Figure().subplots()


def rank(seen: Audit, number: int) -> dict[str, Any]:
    return seen.facts["hosts"]["ranks"][number]


def widths(ax: Axes) -> list[float]:
    return [patch.get_width() for patch in ax.patches]  # type: ignore[attr-defined]


def test_busy_and_waiting_make_up_the_step_and_the_straggler_is_red() -> None:
    ax = wb.hosts.plot(job(3), ax=blank())
    assert np.add(widths(ax)[:3], widths(ax)[3:]) == pytest.approx([20.0] * 3)  # ms
    assert widths(ax)[0] == pytest.approx(1e3 * np.median(rank(job(3), 0)["times"]["busy_s"]))
    seen = job()
    rank(seen, 1)["times"]["busy_s"] = [0.018] * 19
    for record, colors in ((seen, [GOOD, BAD]), (job(), [GOOD, GOOD])):
        bars = wb.hosts.plot(record, wb.hosts.diagnose(record), ax=blank()).patches[:2]
        assert [to_hex(p.get_facecolor()) for p in bars] == colors
    rank(seen, 0)["times"]["busy_s"] = [float("nan")] * 19
    assert len(widths(wb.hosts.plot(seen, ax=blank()))) == 2


def drawn(ax: Axes) -> dict[tuple[float, str], set[int]]:
    """Positions by row and colour."""
    return {
        (line.get_ydata()[0], str(line.get_color())): {int(x) for x in line.get_xdata()}  # type: ignore[index]
        for line in ax.lines
        if len(line.get_xdata())  # type: ignore[arg-type]
    }


def test_each_example_is_drawn_in_the_row_of_its_host_and_red_where_it_is_on_two() -> None:
    found = drawn(wb.hosts.plot_shards(job(), ax=blank()))
    first = [set(rank(job(), r)["passes"][0]["indices"]) for r in range(2)]
    assert found == {(0.0, GOOD): first[0], (1.0, GOOD): first[1]}
    seen = job()
    for number in range(2):
        p = rank(seen, number)["passes"][0]
        p["indices"] = [i for i in p["indices"] if i not in (0, 1, 2)] + [0]
    found = drawn(wb.hosts.plot_shards(seen, ax=blank()))
    assert found[0.0, BAD] == found[1.0, BAD] == {0}
    assert found[2.0, BASELINE] == {1, 2}


def test_nothing_to_draw_says_so() -> None:
    own: Any = job()
    for number, k in itertools.product(range(2), (0, 2)):
        rank(own, number)["passes"][k]["dataset"]["hash"] = f"own{number}"
    assert why_not_measured(wb.hosts.plot_shards(own, ax=blank()))
    for figure in (wb.hosts.plot, wb.hosts.plot_shards):
        assert why_not_measured(figure(Audit(facts={"hosts": {"ranks": []}}, workload="w"), ax=blank()))
