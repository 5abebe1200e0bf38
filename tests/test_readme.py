"""The code of the README and of the pages that it leads to does what they say, copied as it stands."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "docs" / f"{name}.md" for name in ("first_steps", "python", "studies", "notebooks", "parameter_servers")
]
BLOCKS = re.findall(r"```python\n(.*?)```", "\n".join([README, *(page.read_text() for page in PAGES)]), re.DOTALL)


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(README.split()) <= 900


def block(word: str) -> str:
    found = [text for text in BLOCKS if word in text]
    assert len(found) == 1
    return found[0]


def test_your_own_workload_loads_and_is_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = block("wb.classification(")
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    (tmp_path / "mine.py").write_text(source)
    diagnosis = wb.diagnose(wb.load_workload("mine.py:workload"), "runs/mine", steps=60)
    assert diagnosis["data.nonfinite"].status == "ok"
    assert diagnosis["lr.best"].value is not None
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(block("from mine import workload").replace("total_steps=500", "total_steps=20"), names)
    assert names["record"].best().step <= 20


def test_a_training_of_ones_own_is_watched_and_diagnosed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    source = (
        block("def train(run)").replace("range(6)", "range(1)").replace("function(train)", "function(train, seeds=1)")
    )
    exec(source, names)
    assert names["diagnosis"]["loop.no_zero_grad"].status == "ok"
    assert wb.open(names["diagnosis"].path).config["select"] == "validation/loss"
    names["model"] = torch.nn.Linear(64, 10)
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    names["loader"] = torch.utils.data.DataLoader(names["training"], batch_size=64)
    exec(block("wb.watch("), names)
    assert wb.loop.diagnose(wb.open("runs/mine"))["loop.no_zero_grad"].status == "ok"


def test_the_python_tour_and_the_hook_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(block("wb.lr_sweep.diagnose(").replace("steps=300", "lrs=[0.05, 0.1], steps=20"), names)
    small = "workload = workload.replace(config=workload.config.replace(total_steps=20))\n"
    exec("import workbench as wb\n" + small + block("class LossPerLR"), names)
    steps = wb.open("runs/hooked").steps
    assert steps["user/loss_over_lr"].tolist() == pytest.approx((steps["loss"] / steps["lr"]).tolist(), rel=1e-6)
    exec(block('size="column"'), names)
    exec(small + block("record.lanes"), names)
    lanes = wb.open("runs/many").lanes
    assert len(lanes) == 32
    columns = re.findall(r"\w+", block("record.lanes").rpartition(": ")[2])
    assert [name for name in columns if name not in lanes] == []
    assert (lanes["lanes"] == 32).all()


SHORT = {
    "Study(steps=300)": "Study(lrs=[0.05, 0.1], steps=20)",
    "wb.lr_sweep.Study()": "wb.lr_sweep.Study(lrs=[0.1], steps=20)",
    "steps=600": "steps=10, optimizers=('momentum', 'adam'), seeds=1, lrs=[0.05, 0.1]",
    "depths=(2, 4), lrs=(1e-3, 1e-2, 1e-1)": "depths=(1,), lrs=(1e-3, 1e-2), steps=2",
    "batch_sizes=[16, 256], steps=300": "batch_sizes=[16, 256], steps=10, seeds=1, retune=False",
    "batch_size=128, seeds=3, steps=300": "batch_size=128, seeds=1, steps=4, devices=(1, 2), norms=(), lr_factors=(1.0,)",
    "seeds=2, steps=300": "seeds=1, steps=10, lrs=[0.1, 0.2]",
    "digits_resnet_stride1": "digits_mlp",
    '"digits_resnet"': '"digits_mlp"',
    "budget_s=1.0": "budget_s=1.0, steps=20",
    "Study(seeds=5)": "Study(seeds=1, steps=20, evaluations=4)",
    "examples=64, steps=200": "examples=64, steps=10, evaluations=2",
    "digits_cnn": "digits_mlp",
    "wb.evaluation.check(": "found = wb.evaluation.check(",
    "trace=": "seconds=1.0, trace=",
}
"""What makes the studies of the pages small enough for a test."""


@pytest.mark.slow
def test_every_block_about_studies_and_notebooks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_LIVE", "0")
    images = torch.utils.data.TensorDataset(torch.randn(64, 4, 8, 8), torch.randint(0, 10, (64,)))
    normed = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(288, 10))  # fmt: skip
    torch.save(normed.state_dict(), "last.pt")

    def build() -> dict[str, Any]:
        model = torch.nn.Linear(4, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    def update(made: dict[str, Any]) -> float:
        loss = made["model"](torch.ones(2, 4)).square().mean()
        made["optimizer"].zero_grad()
        loss.backward()
        made["optimizer"].step()
        return float(loss.detach())

    names: dict[str, Any] = {
        "wb": wb, "torch": torch, "workload": wb.load_workload("digits_mlp"), "model": normed, "dataset": images,
        "loader": torch.utils.data.DataLoader(images, 16), "build": build,
        "save": lambda made: copy.deepcopy({name: each.state_dict() for name, each in made.items()}),
        "load": lambda made, saved: [made[name].load_state_dict(state) for name, state in saved.items()],
    }  # fmt: skip
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("studies", "notebooks"))
    for source in [block("wb.lr_sweep.diagnose("), *re.findall(r"```python\n(.*?)```", pages, re.DOTALL)]:
        names["step"] = update if "audit_resume" in source else lambda batch: None
        exec(functools.reduce(lambda text, each: text.replace(*each), SHORT.items(), source), names)
    assert names["found"]["evaluation.weighting"].status == "fail"
    assert set(wb.open("runs/evaluation").evals["setting"]) == {"periodic", "offline"}


def test_the_first_steps_on_parameter_servers_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"wb": wb, "torch": torch}
    exec(block("wb.ps.create_in_process_cluster(").replace("epochs=2", "epochs=1"), names)
    assert "epoch 1/1" in capsys.readouterr().out
    assert names["last"] < names["first"] / 2
    assert names["trained"](torch.zeros(1, 64)).shape == (1, 10)


def test_the_parameter_server_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = block("wb.ps.Study(").replace("workers=(1, 2, 3)", "workers=(1, 2), steps=20")
    names: dict[str, Any] = {"wb": wb}
    exec(source.replace("steps=200", "lrs=[0.05, 0.1], steps=20"), names)
    codes = re.findall(r"(?<!wb\.)ps\.\w+", source)
    assert [finding.code for finding in names["diagnosis"]] == codes
    columns = ["clause", "remedy", "measure", "before", "after"]
    assert list(wb.ps.remedies(names["record"]).columns) == columns
    assert ", ".join(columns) in source
    assert names["sweep"].trials["state"].tolist() == ["complete"] * 2
