"""Scripts of the kinds that people publish: adversarial pairs, LBFGS, a warmup in epochs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import workbench as wb
from workbench.cli import main
from workbench.config import TrainConfig
from workbench.errors import WorkbenchError
from workbench.instruments.observer import LoopObserver
from workbench.instruments.taps import TAPS
from workbench.playbook.program import diagnose_program
from workbench.programs.change import Change
from workbench.programs.command import Outcome
from workbench.programs.layout import lay_out
from workbench.programs.trainer import Program, ProgramTrainer
from workbench.record.write import StudyWriter

PAIR = """
import torch
torch.manual_seed(0)
generator, judge = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
against = torch.nn.functional.binary_cross_entropy_with_logits
for k in range(30):
    real, made = torch.randn(16, 2) + 1, generator(torch.randn(16, 2))
    of_judge.zero_grad()
    (against(judge(real), torch.ones(16, 1)) + against(judge(made.detach()), torch.zeros(16, 1))).backward()
    of_judge.step()
    of_generator.zero_grad()
    against(judge(made), torch.ones(16, 1)).backward()
    of_generator.step()
    print(f"distance {(made.mean(0) - 1).norm().item():.4f}")
"""


def folder(tmp_path: Path, text: str) -> Path:
    place = tmp_path / "mine"
    place.mkdir()
    (place / "train.py").write_text(textwrap.dedent(text))
    return place


def diagnose(place: Path, **options: Any) -> wb.Diagnosis:
    return diagnose_program(["python", "train.py"], place.parent / "study", folder=place, threads=1, seeds=1, **options)


def test_losses_of_an_adversarial_pair_tell_nothing_and_a_metric_does(tmp_path: Path) -> None:
    place = folder(tmp_path, PAIR)
    found = diagnose(place)
    assert found.cost["trials"] == 1
    for code in ("lr.best", "stability.divergent"):
        assert (found[code].status, "losses of their own" in found[code].summary) == ("not_measured", True)
    assert "--metric" in (found.recommendation or {})["reason"]
    by_metric = diagnose_program(
        ["python", "train.py"], tmp_path / "other", folder=place, threads=1, seeds=1, metric="distance ([0-9.]+)"
    )
    assert by_metric.cost["trials"] == 3
    assert "distance" in (by_metric.recommendation or {})["reason"]


BANDIT = """
import torch
torch.manual_seed(0)
policy, value = torch.nn.Linear(8, 4), torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=LR)
best = torch.randn(8, 4)
for step in range(200):
    x = torch.randn(64, 8)
    logs = policy(x).log_softmax(1)
    action = ACTION
    rewards = (x @ best).gather(1, action)[:, 0] * (1 + step / 50)
    advantage = WEIGHT
    loss = -(logs.gather(1, action)[:, 0] * advantage.detach()).mean() + 0.5 * SQUARE.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"reward {rewards.mean():.3f}")
"""
"""A policy gradient with a value baseline, on rewards that grow, or the same lines as a weighted likelihood of labels."""
POLICY = {
    "LR": "0.01",
    "ACTION": "torch.multinomial(logs.detach().exp(), 1)",
    "WEIGHT": "rewards - value(x)[:, 0]",
    "SQUARE": "advantage.pow(2)",
}
LABELS = {
    "LR": "1e-6",
    "ACTION": "(x @ best).argmax(1, keepdim=True)",
    "WEIGHT": "0.9 + 0.1 * torch.rand(64)",
    "SQUARE": "0 * advantage.pow(2)",
}


@pytest.mark.parametrize(("parts", "status"), [(POLICY, "not_measured"), (LABELS, "warn")])
def test_a_policy_gradient_is_not_taken_for_a_training_that_learns_nothing(
    tmp_path: Path, parts: dict[str, str], status: str
) -> None:
    text = BANDIT
    for word, there in parts.items():
        text = text.replace(word, there)
    found = diagnose(folder(tmp_path, text), budget="1x")
    assert found["lr.nothing_learns"].status == status
    reason = (found.recommendation or {})["reason"]
    assert ("--metric" in reason) == (status == "not_measured")


def lbfgs(factor: float, lr: float) -> list[float]:
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(5))
    optimizer = torch.optim.LBFGS([w], lr=lr, max_iter=3)
    observer = LoopObserver(lambda _: None, intervention=Change(factor=factor))
    TAPS.add(observer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w**2).sum() + (w**4).sum()
        loss.backward()
        return loss

    try:
        return [optimizer.step(closure).item() for _ in range(4)]
    finally:
        TAPS.remove(observer)


def test_a_learning_rate_is_changed_where_it_is_read_before_the_closure() -> None:
    assert lbfgs(2.0, 0.1) == lbfgs(1.0, 0.2) != lbfgs(1.0, 0.1)


@pytest.mark.parametrize(
    ("lr", "status"),
    [(lambda k: 1e-9 if k < 12 else 0.1, "not_measured"), (lambda _: 1e-9, "fail"), (lambda _: 0.1, "ok")],
)
def test_an_update_that_rounding_swallows_is_no_fault_where_the_learning_rate_warms_up(
    tmp_path: Path, lr: Callable[[int], float], status: str
) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))  # 1 - 1e-9 * gradient is 1 in float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for k in range(20):
            optimizer.param_groups[0]["lr"] = lr(k)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert run.diagnose()["loop.no_update"].status == status


def test_a_program_whose_own_settings_are_the_ones_to_keep_is_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    torch.manual_seed(0)
    x = torch.randn(640, 10)
    loader = DataLoader(TensorDataset(x, (x @ torch.linspace(-1, 1, 10) > 0).long()), batch_size=16, shuffle=True)
    model = torch.nn.Linear(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    """
    place = folder(tmp_path, text)
    monkeypatch.chdir(place)
    assert main(["diagnose", "--threads", "1", "--out", str(tmp_path / "study"), "--", "python", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "Diagnosis of train  [ok]  " in out


def test_a_run_that_is_the_beginning_of_another_is_not_made_again(tmp_path: Path) -> None:
    made: list[tuple[float, int | None]] = []

    class Counted:
        name, shown, settings, patterns = "counted", "counted", {}, {}

        def run(self, scratch: Path, trial: dict[str, Any], *, threads: int | None = None) -> Outcome:
            made.append((trial["factor"], trial["stop_after"]))
            updates = trial["stop_after"] or 20
            losses = [trial["factor"] / (k + 1) for k in range(updates)]
            told = [{"update": k, "name": "val_loss", "value": float(k)} for k in (10, 15)]
            return Outcome(
                columns={"loss": losses, "lr": [0.1] * updates}, metrics=[t for t in told if t["update"] < updates], facts={}, code=0,
                seconds=1.0, start_s=0.0, tail="",
            )  # fmt: skip

    own = TrainConfig(peak_lr=0.1, total_steps=20, batch_size=4, select="validation/loss")
    program = Program(command=Counted(), config=own)  # type: ignore[arg-type]
    whole, other = own.replace(peak_lr=0.2), own.replace(peak_lr=0.4)
    study = StudyWriter.open(tmp_path / "study", kind="program", workload="counted", config=own.to_dict(), settings={})
    trainer = ProgramTrainer()
    for config in (
        whole,
        whole.replace(total_steps=10),
        other.replace(total_steps=10),
        other,
        other.replace(shared_seed=1),
    ):
        trainer.run_trials(program, [config], study, stage="probe")
    study.close()
    assert made == [(2.0, None), (4.0, 10), (4.0, None), (4.0, None)]
    record = wb.open(tmp_path / "study")
    losses = record.steps.set_index("trial")["loss"]
    assert losses[1].tolist() == losses[0].tolist()[:10]
    assert record.evals[record.evals["trial"] == 1]["split"].tolist().count("validation") == 0
    assert record.trials["seconds"].tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_command_from_outside_ends_the_program_too(tmp_path: Path, how: signal.Signals) -> None:
    text = """
    import os, sys, time, torch
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=0.1)
    open(sys.argv[1], "w").write(str(os.getpid()))
    while True:
        optimizer.zero_grad(); w.square().sum().backward(); optimizer.step(); time.sleep(0.1)
    """
    place, told = folder(tmp_path, text), tmp_path.parent / f"{tmp_path.name}-pid"
    words = [
        sys.executable,
        "-c",
        f"import signal, sys; from workbench.cli import main; signal.signal({how.value}, signal.SIG_DFL); sys.exit(main())",
    ]
    with subprocess.Popen(
        [*words, "diagnose", "--threads", "1", "--out", str(tmp_path / "study"), "--", "python", "train.py", str(told)],
        cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as job:  # fmt: skip
        try:
            until = time.monotonic() + 120
            while not (told.exists() and told.read_text()) and time.monotonic() < until:
                time.sleep(0.1)
            job.send_signal(how)
            assert job.wait(60) == 130
        finally:
            job.kill()
    pid = int(told.read_text())
    told.unlink()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_script_that_reads_from_further_out_is_told_what_it_can_reach(tmp_path: Path) -> None:
    place = folder(tmp_path, "import torch\nopen('../../data.txt').read()\n")
    (tmp_path.parent / "data.txt").write_text("mine")
    with pytest.raises(WorkbenchError, match=rf"with what lies in {tmp_path}: .* needs an absolute path"):
        diagnose(place)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("swapped", [True, False])
def test_shapes_that_broadcast_are_found_whichever_way_round_they_are_given(tmp_path: Path, *, swapped: bool) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(6):
            optimizer.zero_grad()
            pair = (torch.randn(8, 1), model(torch.randn(8, 4)).squeeze(1))
            torch.nn.functional.mse_loss(*(pair if swapped else pair[::-1])).backward()
            optimizer.step()
    assert run.diagnose()["loss.broadcast"].status == "fail"


class Named(torch.nn.Module):
    """Takes its batch by name, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)

    def forward(self, *, mask: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.inner(x * mask), labels)


@pytest.mark.parametrize(("again", "status"), [(False, "ok"), (True, "fail")])
def test_batches_that_are_given_by_name_are_compared(tmp_path: Path, *, again: bool, status: str) -> None:
    data = [{"mask": torch.ones(4), "x": torch.randn(4), "labels": k % 2} for k in range(64)]
    loader = DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(loader)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(12):
            optimizer.zero_grad()
            model(**(next(iter(loader)) if again else next(batches))).backward()
            optimizer.step()
    assert run.diagnose()["loop.repeated_batch"].status == status


def test_a_study_beside_the_folder_is_not_laid_out_and_a_file_that_goes_meanwhile_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder(tmp_path, "")
    (place / "notes.txt").write_text("mine")
    scratch = tmp_path / "study" / "runs-1" / "2" / "run"
    scratch.mkdir(parents=True)
    (tmp_path / "study" / "study.json").write_text("{}")

    def torn(source: str, target: Path) -> None:
        target.write_text("half of it")
        raise FileNotFoundError(source)

    monkeypatch.setattr("workbench.programs.layout.shutil.copy2", torn)
    twin = lay_out(place, scratch)
    assert (twin / "notes.txt").read_text() == "mine"
    assert not (twin.parent / "study").exists()


REPLACED = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = torch.nn.Linear(4, 1)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
"""


def test_an_optimizer_of_a_model_that_was_replaced_is_told_with_the_line_that_builds_it(tmp_path: Path) -> None:
    found = diagnose(folder(tmp_path, REPLACED), budget="1x")["loop.optimizer_mismatch"]
    assert (found.status, found.summary.endswith("(train.py:5).")) == ("fail", True), found.summary
