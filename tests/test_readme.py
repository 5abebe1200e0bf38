"""The code of the README and of the pages that it leads to does what they say, copied as it stands."""

from __future__ import annotations

import copy
import functools
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import workbench as wb
from tests.helpers.pages import PAGES, block, blocks


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(PAGES["README.md"].read_text().split()) <= 900


def test_your_own_workload_loads_and_is_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = block("first_steps.md", "wb.classification(")
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    (tmp_path / "mine.py").write_text(source)
    diagnosis = wb.diagnose(wb.load_workload("mine.py:workload"), "runs/mine", steps=60)
    assert diagnosis["data.nonfinite"].status == "ok"
    assert diagnosis["lr.best"].value is not None
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(block("first_steps.md", "from mine import workload").replace("total_steps=500", "total_steps=20"), names)
    assert names["record"].best().step <= 20


def test_a_training_of_ones_own_is_watched_and_diagnosed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    source = (
        block("README.md", "def train(run)")
        .replace("range(6)", "range(1)")
        .replace("function(train)", "function(train, seeds=1)")
    )
    exec(source, names)
    assert names["diagnosis"]["loop.no_zero_grad"].status == "ok"
    assert wb.open(names["diagnosis"].path).config["select"] == "validation/loss"
    names["model"] = torch.nn.Linear(64, 10)
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    names["loader"] = torch.utils.data.DataLoader(names["training"], batch_size=64)
    exec(block("README.md", "wb.watch("), names)
    assert wb.loop.diagnose(wb.open("runs/mine"))["loop.no_zero_grad"].status == "ok"


def test_the_python_tour_and_the_hook_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(block("python.md", "wb.lr_sweep.diagnose(").replace("steps=300", "lrs=[0.05, 0.1], steps=20"), names)
    small = "workload = workload.replace(config=workload.config.replace(total_steps=20))\n"
    exec("import workbench as wb\n" + small + block("python.md", "class LossPerLR"), names)
    steps = wb.open("runs/hooked").steps
    assert steps["user/loss_over_lr"].tolist() == pytest.approx((steps["loss"] / steps["lr"]).tolist(), rel=1e-6)
    exec(block("python.md", 'size="column"'), names)
    exec(small + block("python.md", "record.lanes"), names)
    lanes = wb.open("runs/many").lanes
    assert len(lanes) == 32
    columns = re.findall(r"\w+", block("python.md", "record.lanes").rpartition(": ")[2])
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
    for source in [block("python.md", "wb.lr_sweep.diagnose("), *blocks("studies.md"), *blocks("notebooks.md")]:
        names["step"] = update if "audit_resume" in source else lambda batch: None
        exec(functools.reduce(lambda text, each: text.replace(*each), SHORT.items(), source), names)
    assert names["found"]["evaluation.weighting"].status == "fail"
    assert set(wb.open("runs/evaluation").evals["setting"]) == {"periodic", "offline"}


def test_the_first_steps_on_parameter_servers_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"wb": wb, "torch": torch}
    exec(block("parameter_servers.md", "wb.ps.create_in_process_cluster(").replace("epochs=2", "epochs=1"), names)
    assert "epoch 1/1" in capsys.readouterr().out
    assert names["last"] < names["first"] / 2
    assert names["trained"](torch.zeros(1, 64)).shape == (1, 10)


def test_the_parameter_server_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = block("parameter_servers.md", "wb.ps.Study(").replace("workers=(1, 2, 3)", "workers=(1, 2), steps=20")
    names: dict[str, Any] = {"wb": wb}
    exec(source.replace("steps=200", "lrs=[0.05, 0.1], steps=20"), names)
    codes = re.findall(r"(?<!wb\.)ps\.\w+", source)
    assert [finding.code for finding in names["diagnosis"]] == codes
    columns = ["clause", "remedy", "measure", "before", "after"]
    assert list(wb.ps.remedies(names["record"]).columns) == columns
    assert ", ".join(columns) in source
    assert names["sweep"].trials["state"].tolist() == ["complete"] * 2


def test_a_loop_on_servers_goes_on_after_one_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block about checkpoints where the loop before it still has its cluster."""
    monkeypatch.chdir(tmp_path)
    loop = block("parameter_servers.md", "wb.ps.create_in_process_cluster(").replace("epochs=2", "epochs=1")
    saved = block("parameter_servers.md", "wb.ps.CheckpointManager(").replace("done < 1000", "done < 250")
    names: dict[str, Any] = {"wb": wb, "torch": torch}
    exec(loop + textwrap.indent(saved, "    "), names)
    assert names["done"] >= 250
    assert list((tmp_path / "runs" / "checkpoints").iterdir())


def test_the_blocks_about_logs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, lr in [("lightning_logs/version_0", 0.1), ("runs/lr_0.01", 0.01), ("runs/lr_0.1", 0.1)]:
        Path(folder).mkdir(parents=True)
        frame = pd.DataFrame({"step": range(100), "train_loss": [0.9 ** (lr * k) for k in range(100)], "lr": lr})
        frame.to_csv(f"{folder}/metrics.csv", index=False)
    exec(block("logs.md", "wb.read_log("), names := {"frame": frame})
    assert len(names["record"].steps) == 100
    assert wb.open("runs/judged").steps["lr"].iloc[0] == 0.1
    exec(block("python.md", "wb.judge("), {"wb": wb})


def test_the_block_about_hosts_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / f"{k}.bin" for k in range(8)]
    for path in paths:
        path.write_bytes(bytes(10))
    names: dict[str, Any] = {"wb": wb, "paths": paths, "rank": 0}
    source = block("python.md", "wb.hosts.Study(").replace("digits_cnn", "digits_mlp")
    source = source.replace("hosts=2)", "hosts=2, steps=8)")
    (job,) = re.findall(r"^wb\.hosts\.audit\(.*", source, re.MULTILINE)
    subprocess.run([sys.executable, "-c", f"import workbench as wb; {job}"], check=True, capture_output=True)
    exec(source.replace(job, ""), names)
    assert names["diagnosis"]["hosts.sharding"].status == "ok"


def test_a_study_goes_to_an_object_store_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    monkeypatch.chdir(tmp_path)
    study = tmp_path / "runs" / "mine" / "trials.csv"
    study.parent.mkdir(parents=True)
    study.write_text("lr\n0.1\n")
    source = block("clusters.md", "fsspec.filesystem(").replace('"s3"', '"memory"')
    before, get = source.split("store.get")
    exec(before, names := {})
    study.unlink()
    exec(f"store.get{get}", names)
    assert study.read_text() == "lr\n0.1\n"
