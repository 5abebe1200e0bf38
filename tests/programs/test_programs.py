"""A command that trains is run as it is, changed at its optimizer's boundary alone, and nothing of its folder is overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.cli import main
from workbench.config import TrainConfig
from workbench.errors import RecordError, UsageError, WorkbenchError
from workbench.playbook.program import diagnose_program
from workbench.programs.command import Command, Outcome, check_command, run_command
from workbench.programs.trainer import write_outcome
from workbench.record.folder import check_folder
from workbench.record.write import StudyWriter

SCRIPT = """
import sys, torch
torch.manual_seed(3)
lr = float(sys.argv[1]) if len(sys.argv) > 1 else 0.1
factor, warmup, limit, end = (float(a) for a in (sys.argv[2:] + ["1", "0", "0", "20"][len(sys.argv[2:]):]))
w = torch.nn.Parameter(torch.randn(5))
a = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05])
optimizer = torch.optim.SGD([w], lr=lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
for k in range(20):
    if k >= end:
        break
    optimizer.zero_grad()
    loss = 0.5 * (a * (w + 0.1 * torch.randn(5)) ** 2).sum()
    loss.backward()
    if limit:
        torch.nn.utils.clip_grad_norm_([w], limit)
    kept = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = kept * factor * (k / warmup if k < warmup else 1.0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = kept
    schedule.step()
    print(f"step {k} value {loss.item():.9g}")
"""
NOTHING: dict[str, Any] = {"factor": 1.0, "warmup_steps": 0, "max_grad_norm": None, "stop_after": None, "seed": 0}


def folder(tmp_path: Path, text: str = SCRIPT) -> Path:
    place = tmp_path / "mine"
    place.mkdir(exist_ok=True)
    (place / "train.py").write_text(textwrap.dedent(text))
    return place


def run(place: Path, scratch: Path, *arguments: str, **changes: Any) -> Outcome:
    known = {name: changes.pop(name) for name in list(changes) if name in NOTHING}
    command = Command(words=check_command(["python", "train.py", *arguments], place), folder=place, **changes)
    return run_command(command, scratch, NOTHING | known, threads=1)


def alone(place: Path, *arguments: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "train.py", *arguments], cwd=place, capture_output=True, text=True, check=True
    )
    return [float(line.split()[-1]) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("changes", "twin"),
    [
        ({}, ()),
        ({"factor": 2.0}, ("0.1", "2")),
        ({"warmup_steps": 8}, ("0.1", "1", "8")),
        ({"max_grad_norm": 0.3}, ("0.1", "1", "0", "0.3")),
        ({"factor": 0.5, "stop_after": 12}, ("0.1", "0.5", "0", "0", "12")),
    ],
)
def test_a_change_is_what_the_program_would_have_done_by_itself(
    tmp_path: Path, changes: dict[str, Any], twin: tuple[str, ...]
) -> None:
    place = folder(tmp_path)
    outcome = run(place, tmp_path / "run", **changes)
    np.testing.assert_allclose(outcome.columns["loss"], alone(place, *twin), rtol=1e-6)
    assert outcome.code == 0
    assert [path.name for path in place.iterdir()] == ["train.py"]


def test_a_seed_moves_the_one_that_the_program_sets(tmp_path: Path) -> None:
    place = folder(tmp_path)
    first, again, other = (run(place, tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1)))
    assert first.columns["loss"] == again.columns["loss"] != other.columns["loss"]
    assert first.facts["seeded"] == ["train.py:3"]


def test_metrics_are_read_from_the_output_at_their_update(tmp_path: Path) -> None:
    patterns = {"value": r"value ([0-9.e+-]+)", "none": "(never)?step"}
    outcome = run(folder(tmp_path), tmp_path / "run", patterns=patterns)
    assert [row["update"] for row in outcome.metrics] == list(range(1, 21))
    np.testing.assert_allclose([row["value"] for row in outcome.metrics], outcome.columns["loss"], rtol=1e-5)


OTHER_RANK = """
import random, torch, workbench as wb
import numpy as np
torch.manual_seed(seed=3), random.seed(a=4), np.random.seed(seed=5)
w = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([w], lr=0.1)
for k in range(1000):
    optimizer.zero_grad()
    loss = (w ** 2).sum() if k < 50 else (w * torch.nan).sum()
    loss.backward()
    optimizer.step()
    wb.log(note="no number", k=k)
    print("done", k, int(torch.initial_seed()), random.random(), np.random.rand())
"""


def test_every_rank_of_a_training_that_diverges_is_ended_and_seeds_given_by_name_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    outcome = run(folder(tmp_path, OTHER_RANK), tmp_path / "run", seed=7)
    assert outcome.code == 0
    assert not outcome.columns  # rank 0 is who writes
    lines = outcome.tail.splitlines()
    assert int(lines[-1].split()[1]) < 200
    assert lines[-1].split()[2] == "10"


def test_a_run_that_is_observed_in_part_only_has_failed(tmp_path: Path) -> None:
    text = SCRIPT.replace(
        "    loss.backward()",
        "    from workbench.instruments.taps import TAPS\n    if k == 12: del TAPS.listeners[0].intervention\n    loss.backward()",
    )
    outcome = run(folder(tmp_path, text), tmp_path / "run", factor=0.5)
    assert outcome.code == 0
    assert "intervention" in outcome.facts["fault"]
    own = TrainConfig(peak_lr=0.1, total_steps=20, batch_size=1)
    config = own.replace(peak_lr=0.05)
    writer = StudyWriter.open(tmp_path / "study", kind="program", workload="train", config=own.to_dict())
    trial = writer.trial(config.to_dict(), stage="sweep", train_examples=1)
    write_outcome(trial, config, outcome, own=own)
    assert trial.events[-1]["state"] == "failed"
    assert "intervention" in trial.events[-1]["said"]
    writer.close()
    command = Command(words=("python", "train.py"), folder=tmp_path)
    assert "intervention" in str(command.failure(outcome))


def test_a_command_that_was_stopped_while_its_folder_was_laid_out_begins_nothing(tmp_path: Path) -> None:
    place = folder(tmp_path)
    command = Command(words=check_command(["python", "train.py"], place), folder=place)
    command.stop()
    with pytest.raises(KeyboardInterrupt):
        run_command(command, tmp_path / "run", NOTHING)
    assert not (tmp_path / "run" / "told" / "rows.jsonl").exists()


WRITES = """
import os, torch
os.makedirs("out", exist_ok=True)
w = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([w], lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    (w ** 2).sum().backward()
    optimizer.step()
torch.save(w, "out/model.pt")
open("new.txt", "w").write("new")
"""


@pytest.mark.parametrize("how", [{"redirect": ("out",)}, {"copy": True}])
def test_nothing_that_was_there_before_is_overwritten(tmp_path: Path, how: dict[str, Any]) -> None:
    place = folder(tmp_path, WRITES)
    (place / "out").mkdir()
    precious = b"precious" * 200_000
    (place / "out" / "model.pt").write_bytes(precious)
    (place / "new.txt").write_text("old")
    refused = run(place, tmp_path / "refused")
    assert refused.refused == {"path": "out/model.pt", "line": "train.py:10"}
    assert run(place, tmp_path / "run", **how).code == 0
    assert (place / "out" / "model.pt").read_bytes() == precious
    assert (place / "new.txt").read_text() == "old"
    with pytest.raises(UsageError, match="--redirect out"):
        diagnose_program(["python", "train.py"], tmp_path / "study", folder=place)


def test_what_a_program_leaves_running_is_ended(tmp_path: Path) -> None:
    text = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\nprint('child', child.pid)"
    outcome = run(folder(tmp_path, text), tmp_path / "run")
    pid = int(outcome.tail.split()[-1])
    status = Path("/proc", str(pid), "stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("text", "words", "error", "message"),
    [
        ("", [], UsageError, "nothing was given after --"),
        ("", ["no-such-program"], UsageError, "no program 'no-such-program'"),
        ("", ["python", "other.py"], UsageError, r"no file 'other.py' .*train.py"),
        (
            "raise ValueError('no \\x1b[1mdata\\x1b[0m')",
            ["python", "train.py"],
            WorkbenchError,
            r"^`python train.py` failed with exit code 1 after 0 updates: it has to run by itself first. It printed last: train.py:1, `raise ValueError\(.*`: ValueError: no data$",
        ),
        (
            "open('no.csv')",
            ["python", "train.py"],
            WorkbenchError,
            "twin of .* needs an absolute path.*train.py:1, `open.*FileNotFoundError",
        ),
        (
            "import torch\ntorch.nn.Linear(3, 1)(torch.ones(8, 4))",
            ["python", "train.py"],
            WorkbenchError,
            r"first. It printed last: train.py:2, `torch.nn.Linear\(3, 1\).*`: RuntimeError: mat1 and mat2",
        ),
        ("input()", ["python", "train.py"], WorkbenchError, "Nobody types.*EOFError"),
        ("print('hello')", ["python", "train.py"], WorkbenchError, "no step of a torch optimizer.*hello"),
        (
            "import sys; sys.stdout.buffer.write(bytes(range(256)))",
            ["python", "train.py"],
            WorkbenchError,
            "no step of a torch",
        ),
    ],
)
def test_a_command_that_cannot_be_diagnosed_says_why(
    tmp_path: Path, text: str, words: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        diagnose_program(words, tmp_path / "study", folder=folder(tmp_path, text))
    assert not (tmp_path / "study" / "study.json").exists()


def test_a_folder_whose_script_was_mended_since_is_another_study(tmp_path: Path) -> None:
    place = folder(tmp_path)
    (place / "beside.py").write_text("x = 1")
    command = Command(words=("python", "train.py"), folder=place, patterns={"loss": "loss (.*)"})
    before = {"workload": "train", "config": {}, "settings": command.settings}
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.json").write_text(json.dumps(before))
    check_folder(tmp_path / "study", before | {"settings": command.settings})
    (place / "beside.py").write_text("x = 2")
    with pytest.raises(RecordError, match="before its code was changed"):
        check_folder(tmp_path / "study", before | {"settings": command.settings})
    assert replace(command, patterns={}).settings != command.settings


@pytest.mark.slow
def test_no_secret_of_a_command_is_in_its_study(tmp_path: Path) -> None:
    pw = os.urandom(8).hex()  # drawn, or a patch of this file would hold it
    text = WRITES.split("torch.save")[0] + "raise SystemExit(0)"
    words = ["python", "train.py", "--token", pw, f"--api-key={pw}", "--hub", f"hf_{pw}{pw}"]
    diagnose_program(words, tmp_path / "study", folder=folder(tmp_path, text), note=f"run with HF_TOKEN={pw}")
    kept = [path for path in (tmp_path / "study").rglob("*") if path.is_file()]
    assert any(path.name == "report.html" for path in kept)
    assert [path.name for path in kept if pw.encode() in path.read_bytes()] == []
    settings = json.loads((tmp_path / "study" / "study.json").read_text())["settings"]
    assert settings["command"].endswith("train.py --token *** --api-key=*** --hub ***")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu", "--", "python", "train.py"], "--device is for a workload"),
        (
            ["--metric", "accuracy", "digits_mlp"],
            "--metric is for a command after --; a workload names its metric in its config: select=",
        ),
        (["--copy", "digits_mlp"], "--copy is for a command after --"),
        (["--device", "cuda:99", "digits_mlp"], "Use --device cpu or --device auto, or install"),
        (["--metric", "(", "--", "python", "train.py"], "--metric '(' is not a regular expression"),
        (["--", "no-such-program"], "there is no program 'no-such-program'"),
    ],
)
def test_a_wrong_argument_is_told_at_once_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(folder(tmp_path))
    assert main(["diagnose", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("accuracy ([0-9.]+)", "matches no line"),
        ("val loss", "no group"),
        ("(", "regular expression"),
        ("values: ([0-9.]+)", r"'value \(\[0-9.eE\+-\]\+\)' fits what it printed"),
        ("value", r"^metric='value': the program gave wb.log no such value. 'value \(.* fits what it printed"),
        ("val_loss", r"^metric='val_loss': .* needs a group"),
    ],
)
def test_a_metric_that_is_not_there_is_told_with_what_is(tmp_path: Path, metric: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        diagnose_program(["python", "train.py"], tmp_path / "study", folder=folder(tmp_path), metric=metric)


QUADRATIC = """
import torch
a = torch.tensor([1.0, 0.3, 0.01])
w = torch.nn.Parameter(torch.tensor([1.0, -1.0, 1.0]))
optimizer = torch.optim.SGD([w], lr=0.4)
for _ in range(100):
    optimizer.zero_grad()
    (0.5 * (a * w ** 2).sum()).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_the_unstable_lr_of_a_scripted_quadratic_is_two_over_its_curvature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder(tmp_path, QUADRATIC))
    words = "diagnose --out runs/one --seeds 1 --threads 1 --jobs 2 -- python train.py"
    assert main(words.split()) == 0
    findings = {f["code"]: f for f in json.loads(Path("runs/one/diagnosis.json").read_text())["findings"]}
    assert findings["lr.unstable"]["value"] == pytest.approx(2.0, rel=0.05)
    assert findings["loop.no_zero_grad"]["status"] == "ok"
    assert "<h2>Lines to change</h2>" in Path("runs/one/report.html").read_text()
    assert "Reproduce: workbench diagnose" in capsys.readouterr().out


SURROUNDED = """
import os, shutil, sys
big = os.path.realpath("../data/big.bin")
made = os.path.join(os.path.dirname(big), "made")
open(made, "w").write("by the program itself"), os.rename(made, made + "2"), os.remove(made + "2"), open(made, "w").write("and left there")
for harm in (os.remove, lambda p: os.rename(p, "mine"), lambda p: os.rename("train.py", p), lambda p: shutil.rmtree(os.path.dirname(p)), lambda p: os.truncate(p, 0), lambda p: open(p, "a"), lambda p: open("../data/big.bin", "a")):
    try:
        harm(big)
        print("HARMED")
    except PermissionError:
        pass
os.remove("../data/big.bin")
import torch
assert sys.stdin.isatty() and os.get_terminal_size(0).columns > 0 and not sys.stdin.read()
def main():
    w = torch.nn.Linear(3, 1)
    scale = float(open("../data/scale.txt").read())
    optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
    while True:
        optimizer.zero_grad()
        (scale * w(torch.ones(2, 3)) ** 2).mean().backward()
        optimizer.step()
try:
    main()
except SystemExit:
    open("../data/scale.txt", "w").write("3")
"""


def test_a_program_that_never_ends_reads_beside_its_folder_and_writes_nothing_there(tmp_path: Path) -> None:
    place = folder(tmp_path, SURROUNDED)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "scale.txt").write_text("2")
    (tmp_path / "data" / "big.bin").write_bytes(bytes(1_500_000))
    outcome = run(place, tmp_path / "run", stop_after=12)
    assert outcome.updates == 12
    assert outcome.facts["built"] == ["train.py:18"]
    assert outcome.facts["loop"]["parameters"]["named"]  # though the model is gone when the process ends
    assert outcome.refused == {"path": "../data/big.bin", "line": "train.py:8"}
    assert "HARMED" not in outcome.tail
    assert (tmp_path / "data" / "big.bin").stat().st_size == 1_500_000
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["big.bin", "scale.txt"]
    assert (tmp_path / "data" / "scale.txt").read_text() == "2"


def test_training_goes_on_where_its_record_vanishes(tmp_path: Path) -> None:
    text = SCRIPT.replace(
        "for k in range(20):",
        "import os, shutil\nfor k in range(300):\n    if k == 120: shutil.rmtree(os.environ['WORKBENCH_TRIAL'].rsplit('/', 1)[0])\n    if k == 299: open('/proc/self/cwd/../../../../done', 'w').write('done')",
    )
    with pytest.raises(WorkbenchError, match="was removed"):
        run(folder(tmp_path, text), tmp_path / "run", "0.1", "1", "0", "0", "300")
    assert (tmp_path / "done").read_text() == "done"
