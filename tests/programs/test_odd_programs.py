"""Programs that do what a diagnosis does not expect: they end early, leave others running, train twice, or are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.killed_programs import wait_until
from workbench.errors import UsageError, WorkbenchError
from workbench.playbook.program import diagnose_program
from workbench.programs import command
from workbench.programs.command import Command, Outcome, check_command, run_command
from workbench.programs.forks import end_run
from workbench.record.read import open_record

NOTHING: dict[str, Any] = {"factor": 1.0, "warmup_steps": 0, "max_grad_norm": None, "stop_after": None, "seed": 0}
TRAINS = """
import torch
torch.manual_seed(3)
w = torch.nn.Parameter(torch.tensor([1.0, -1.0, 1.0]))
optimizer = torch.optim.SGD([w], lr=0.4)
curvature = torch.tensor([1.0, 0.3, 0.01])
for k in range(UPDATES):
    optimizer.zero_grad()
    loss = 0.5 * (curvature * w ** 2).sum()
    loss.backward()
    optimizer.step()
    print("loss is", "high" if loss > 0.5 else "low", "after", loss.item())
"""


def folder(tmp_path: Path, text: str, updates: int = 20) -> Path:
    place = tmp_path / "mine"
    place.mkdir(exist_ok=True)
    (place / "train.py").write_text(textwrap.dedent(text).replace("UPDATES", str(updates)))
    return place


def run(place: Path, scratch: Path, **changes: Any) -> Outcome:
    given = Command(words=check_command(["python", "train.py"], place), folder=place)
    return run_command(given, scratch, NOTHING | changes, threads=1)


def is_gone(pid: int) -> bool:
    status = Path("/proc", str(pid), "stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_command_that_is_no_python_program_says_so(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="no step of a torch optimizer.*no training here"):
        diagnose_program(["echo", "no training here"], tmp_path / "study", folder=folder(tmp_path, ""))
    assert not (tmp_path / "study" / "study.json").exists()


def test_parameters_that_are_updated_by_hand_are_told_with_the_line(tmp_path: Path) -> None:
    by_hand = TRAINS.replace("optimizer.step()", "w.data.add_(w.grad, alpha=-0.4)")
    with pytest.raises(
        WorkbenchError, match=r"made 20 backward passes \(train.py:10\), and no optimizer of torch.optim"
    ):
        diagnose_program(["python", "train.py"], tmp_path / "study", folder=folder(tmp_path, by_hand))


def test_a_program_that_asks_whether_torch_is_installed_before_it_imports_it_is_observed(tmp_path: Path) -> None:
    """As transformers and datasets do."""
    text = f"import importlib.util\nassert importlib.util.find_spec('torch') is not None\n{TRAINS}"
    assert run(folder(tmp_path, text), tmp_path / "run").updates == 20


@pytest.mark.parametrize("metric", [r"loss is (\w+)", r"(high|low)"])
def test_a_metric_that_matches_text_is_refused_with_what_was_printed(tmp_path: Path, metric: str) -> None:
    with pytest.raises(UsageError, match=r"matches no line with a number.*loss is low after"):
        diagnose_program(["python", "train.py"], tmp_path / "study", folder=folder(tmp_path, TRAINS), metric=metric)


def test_a_program_that_ends_before_it_is_told_to_has_the_updates_that_it_made(tmp_path: Path) -> None:
    outcome = run(folder(tmp_path, TRAINS), tmp_path / "run", stop_after=50)
    assert (outcome.updates, outcome.code, outcome.facts["stopped"]) == (20, 0, False)


CHILDREN = {
    "workers of a loader": "from torch.utils.data import DataLoader\nloader = DataLoader(list(range(1000)), 2, num_workers=2, persistent_workers=True)\nit = iter(loader); next(it)\npids = [c.pid for c in multiprocessing.active_children()]",
    "processes": "children = [multiprocessing.Process(target=time.sleep, args=(600,)) for _ in range(2)]\n[c.start() for c in children]\npids = [c.pid for c in children]",
    "a process in a session of its own": "pids = [subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True).pid]",
    "a process that ignores its end": "pids = [subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)']).pid]",
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_children_of_a_program_that_is_ended_early_are_ended_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of processes that are no daemons the program itself would wait for the end."""
    monkeypatch.setattr(command, "GRACE_S", 1.0)
    text = f"import multiprocessing, subprocess, sys, time\n{CHILDREN[kind]}\nprint('pids', *pids)\n{TRAINS}"
    outcome = run(folder(tmp_path, text, updates=1000), tmp_path / "run", stop_after=10)
    pids = [int(word) for line in outcome.tail.splitlines() if line.startswith("pids") for word in line.split()[1:]]
    assert outcome.updates == 10
    assert pids
    wait_until(
        lambda: all(map(is_gone, pids)), timeout_s=10.0, what="the end of the children"
    )  # it takes its time after the signal


@pytest.mark.slow
def test_of_two_trainings_one_after_the_other_it_is_said_that_the_first_is_judged(tmp_path: Path) -> None:
    place = folder(tmp_path, TRAINS + TRAINS.replace("import torch", "").replace("lr=0.4", "lr=0.1"))
    outcome = run(place, tmp_path / "run")
    assert outcome.updates == 20
    assert set(outcome.columns["lr"]) == {0.4}
    diagnosis = diagnose_program(["python", "train.py"], tmp_path / "study", folder=place, seeds=1, threads=1)
    second = diagnosis["loop.second_training"]
    assert second.status == "ok"
    assert "Judged: the first of 2 trainings one after the other, 20 of 40 updates (train.py:" in second.summary
    assert "adds its own to the seeds set in train.py:3" in str(open_record(tmp_path / "study").study["note"])


@pytest.mark.slow
def test_ctrl_c_while_a_command_runs_ends_its_processes_and_the_same_call_goes_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = f"import os, time\nopen(os.environ['PIDS'], 'a').write(f'{{os.getpid()}} ')\n{TRAINS}    time.sleep(float(os.environ['SLOW']))\n"
    place = folder(tmp_path, text)
    pids = tmp_path_factory.mktemp("elsewhere") / "pids"  # beside the program's folder it would be removed
    words = [sys.executable, "-m", "workbench", "diagnose", "--out", str(tmp_path / "study"), "--seeds", "1", "--threads", "1", "--", "python", "train.py"]  # fmt: skip
    environment = {**os.environ, "PIDS": str(pids), "SLOW": "0.05", "PYTHONPATH": str(Path(__file__).parents[2])}
    job = subprocess.Popen(words, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 240
    while time.monotonic() < until and len(pids.read_text().split() if pids.exists() else ()) < 3:
        time.sleep(0.1)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=120)
    assert job.returncode == 130, said
    assert "the same command or cell resumes from what is kept in" in said
    begun = [int(pid) for pid in pids.read_text().split()]
    assert len(begun) >= 3
    assert [pid for pid in begun if not is_gone(pid)] == []
    finished = int((open_record(tmp_path / "study").trials["state"] == "complete").sum())
    assert finished >= 1
    again = subprocess.run(
        words, cwd=place, env=environment | {"SLOW": "0"}, capture_output=True, text=True, timeout=400
    )
    assert again.returncode == 0, again.stderr
    record = open_record(tmp_path / "study")
    assert (
        len(pids.read_text().split()) == len(begun) + len(record.trials) - finished
    )  # nothing ran twice but what was interrupted
    assert [p.name for p in place.iterdir()] == ["train.py"]


BOWL = """
import sys, torch
w = torch.nn.Parameter(torch.ones(4)); a = torch.tensor([1.0, 0.5, 0.2, 0.1])
optimizer = torch.optim.SGD([w], lr=0.7)
for k in range(60):
    optimizer.zero_grad(); loss = 0.5 * (a * w**2).sum(); loss.backward(); optimizer.step()
    {ends}
"""


@pytest.mark.parametrize(("ends", "lost"), [("if loss > 3: sys.exit(0)", True), ("if loss < 1e-3: break", False)])
def test_runs_that_a_program_ends_itself_are_told_or_have_diverged_and_the_search_ends(
    tmp_path: Path, ends: str, lost: bool
) -> None:
    """The bowl is stable below lr 2; at a larger lr than its own the program reaches its tolerance earlier."""
    place = folder(tmp_path, BOWL.replace("{ends}", ends))
    diagnosis = diagnose_program(["python", "train.py"], tmp_path / "study", folder=place, seeds=1, threads=1)
    trials = open_record(tmp_path / "study").trials
    given_up = trials[trials["state"] == "diverged"]
    assert bool(len(given_up)) == lost
    assert (given_up["peak_lr"] >= 2.0).all()
    assert ("stopped early by the program itself" in diagnosis.recommendation["paste"]) == (not lost)


def test_a_program_that_leaves_python_without_its_end_is_told_of(tmp_path: Path) -> None:
    text = TRAINS + "\nimport os; os._exit(0)"
    with pytest.raises(WorkbenchError, match=r"ended after \d+ updates in a way that Python does not see"):
        diagnose_program(["python", "train.py"], tmp_path / "study", folder=folder(tmp_path, text, updates=300))


def test_no_process_that_has_the_number_of_a_run_that_was_waited_for_is_ended(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        ours = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
        ours.wait()
        ours.pid = stranger.pid
        end_run(ours, tmp_path / "trial.json")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model, x, y = START
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for k in range(12):
    optimizer.zero_grad(); loss = (model(x) - y).square().mean(); loss.backward(); optimizer.step()
dist.destroy_process_group()
"""
START = "(torch.manual_seed(1), nn.Linear(6, 3))[1], torch.randn(16, 6), torch.randn(16, 3)"


@pytest.mark.slow
def test_gradients_sharded_over_processes_are_clipped_by_their_whole_norm(tmp_path: Path) -> None:
    limit, losses = 0.05, []
    model, x, y = eval(START, {"torch": torch, "nn": torch.nn})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(12):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        losses.append(loss.item())
    place = folder(tmp_path, SHARDED.replace("START", START))
    given = Command(words=check_command(["torchrun", "--nproc-per-node", "2", "train.py"], place), folder=place)
    outcome = given.run(tmp_path / "run", NOTHING | {"max_grad_norm": limit}, threads=1)
    assert outcome.facts["fault"] == ""
    assert outcome.columns["loss"] == pytest.approx(losses, rel=1e-5)
    assert outcome.columns["clipped"] == [1.0] * 12


STOPS = """
import torch
w = torch.nn.Parameter(3 * torch.randn(8))
optimizer = torch.optim.SGD([w], lr=0.03)
x, unseen = torch.randn(256, 8), torch.randn(256, 8)
y, wanted = x.sum(1) + 0.5 * torch.randn(256), unseen.sum(1) + 0.5 * torch.randn(256)
best, waited = float("inf"), 0
for k in range(60):
    i = torch.randint(256, (32,))
    optimizer.zero_grad()
    ((x[i] @ w - y[i]) ** 2).mean().backward()
    optimizer.step()
    value = float(((unseen @ w - wanted) ** 2).mean())
    print("val loss", value)
    best, waited = (value, 0) if value < 0.999 * best else (best, waited + 1)
    if waited == 10:
        break
"""


@pytest.mark.slow
def test_runs_that_a_program_stops_early_are_candidates_by_their_best_value_and_proved(tmp_path: Path) -> None:
    place, out = folder(tmp_path, STOPS), tmp_path / "study"
    diagnosis = diagnose_program(["python", "train.py"], out, folder=place, metric="val loss ([0-9.]+)", threads=1)
    found, trials = diagnosis.recommendation, open_record(out).trials.set_index("trial")
    assert found["adopted"], found["reason"]
    chosen, own = trials.loc[found["chosen"]["trial"]], trials.loc[0]
    assert chosen["steps_run"] < chosen["total_steps"] == own["steps_run"]
    assert found["config"]["peak_lr"] == chosen["peak_lr"]
    values = trials[trials["stage"] == "proof"].groupby("peak_lr")["best_value"].mean()
    assert found["proof"]["wins"]
    assert values[chosen["peak_lr"]] == pytest.approx(sum(found["proof"]["candidate"]) / len(found["proof"]["seeds"]))
    told = f"(lr {chosen['peak_lr']:.3g}) after {chosen['steps_run']:.0f} of 60 updates, {chosen['best_value']:.4g} at step {chosen['best_step']:.0f}"
    assert told in found["paste"]


SCALED = """
import torch
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(256, 4), torch.randn(256, 1)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for k in range(120):
    pick = torch.randint(256, (32,))
    mean, log_variance = model(x[pick]).chunk(2, 1)
    optimizer.zero_grad()
    LOSS.mean().backward()
    optimizer.step()
    print(f"epoch {k} Val loss: {0.5 + 1 / (k + 1):.4f}")
"""


FITS = """
import torch
torch.manual_seed(0)
x = torch.randn(256, 8)
y = x.sum(1, keepdim=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
for epoch in range(80):
    pick = torch.randint(256, (32,))
    loss = torch.nn.functional.mse_loss(model(x[pick]), y[pick])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch} val auc {0.9:.4f}")
"""


def test_a_larger_lr_is_not_advised_where_no_printed_validation_score_is_better(tmp_path: Path) -> None:
    """By the training loss it is: that falls four times as far."""
    found = diagnose_program(
        ["python", "train.py"], tmp_path / "study", folder=folder(tmp_path, FITS), seeds=1, threads=1, budget="3x"
    )
    assert found["lr.too_low"].status == "ok"
    assert "what the program prints of validation is no better (val auc 0.9 against 0.9)" in found["lr.too_low"].summary
    assert not found.recommendation["adopted"]


def test_a_loss_that_falls_without_end_is_named_and_no_lr_is_adopted_by_it(tmp_path: Path) -> None:
    """The sign of the logarithm of a variance, and its healthy twin: the Gaussian likelihood, which has a minimum."""
    errors = "(y[pick] - mean) ** 2 * torch.exp(-log_variance)"
    said = {}
    for sign in "-+":
        place = tmp_path / sign
        place.mkdir()
        (place / "train.py").write_text(SCALED.replace("LOSS", f"({errors} {sign} log_variance)"))
        said[sign] = diagnose_program(["python", "train.py"], place / "study", folder=place, seeds=1, threads=1)
    assert said["-"].findings[0].code == "loss.unbounded"
    assert not said["-"].recommendation["adopted"]
    assert "loss.unbounded" not in {f.code for f in said["+"].findings}
    assert said["+"].recommendation["config"]["select"] == "validation/loss"  # it prints one
    assert "--metric train_loss compares by the training loss" in said["+"].recommendation["paste"]
