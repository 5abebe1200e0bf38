"""One trial on several hosts, real processes over gloo: the same numbers as on one, and one of them writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.torchrun import torchrun
from tests.hosts.programs.together import cases, normalised
from workbench.record.read import open_record
from workbench.topics.batch_norm.collect import audit_batch_norm
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm
from workbench.train.checkpoint import latest_checkpoint, load_checkpoint, load_model, save_checkpoint
from workbench.train.evaluation import evaluate
from workbench.train.trainer import Trainer

HOSTS = 2


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    torchrun("tests.hosts.programs.together", folder, hosts=HOSTS)
    return folder


@pytest.fixture(scope="module")
def seen(together: Path) -> list[dict[str, Any]]:
    return [json.loads((together / f"seen-{rank}.json").read_text()) for rank in range(HOSTS)]


@pytest.mark.parametrize("name", list(cases()))
def test_losses_and_metrics_are_those_of_one_host(name: str, together: Path, tmp_path: Path) -> None:
    alone = Trainer(device="cpu", gradients="loop").run(cases()[name], out=tmp_path / name)
    joined = open_record(together / name)
    assert len(joined.steps) == len(alone.steps) > 0
    for column in ("loss", "grad_norm", "lr", "clipped"):
        np.testing.assert_allclose(joined.steps[column], alone.steps[column], rtol=1e-9, err_msg=column)
    if name not in ("weighted", "masked"):  # there the standard error between hosts is that of equal weights
        np.testing.assert_allclose(joined.steps["loss_se"], alone.steps["loss_se"], rtol=1e-9)
    for column in ("step", "num_examples", "num_correct"):
        np.testing.assert_array_equal(joined.evals[column], alone.evals[column])
    np.testing.assert_allclose(joined.evals["value"], alone.evals["value"], rtol=1e-9)
    for column in ("step", "example"):
        assert joined.predictions[column].tolist() == alone.predictions[column].tolist()
    np.testing.assert_allclose(joined.predictions["loss"], alone.predictions["loss"], rtol=1e-7)


def test_batch_norm_over_all_hosts_trains_as_one_host_and_by_itself_does_not(together: Path, tmp_path: Path) -> None:
    alone = Trainer(device="cpu", gradients="loop").run(normalised(), out=tmp_path / "normalised")
    joined, local = open_record(together / "normalised"), open_record(together / "local")
    np.testing.assert_allclose(joined.steps["loss"], alone.steps["loss"], rtol=1e-9)
    np.testing.assert_allclose(joined.evals["value"], alone.evals["value"], rtol=1e-9)
    assert np.abs(local.steps["loss"] - alone.steps["loss"]).max() > 1e-3, (
        "four examples normalise otherwise than eight"
    )


def test_a_checkpoint_has_merged_statistics_and_gives_the_metric_that_was_recorded(together: Path) -> None:
    """P7.3: evaluated alone, from the file, the model is the one that all hosts evaluated together."""
    record = open_record(together / "local")
    best = record.best()
    assert best is not None
    assert best.checkpoint is not None
    model = load_model(normalised().build_model().double(), best.checkpoint)
    value = evaluate(normalised(), model, batch_size=32, precision="float64")[0].value
    assert value == pytest.approx(best.value, rel=1e-9)
    stored = load_checkpoint(best.checkpoint)
    means = [stored.trainer[f"{host}statistics/1.running_mean"] for host in ("", "host1/")]
    variances = [stored.trainer[f"{host}statistics/1.running_var"] for host in ("", "host1/")]
    assert not torch.equal(*means)
    torch.testing.assert_close(stored.model["1.running_mean"], sum(means) / 2)
    between = ((means[0] - means[1]) / 2) ** 2
    torch.testing.assert_close(stored.model["1.running_var"], sum(variances) / 2 + between)


def test_weighted_examples_leave_the_standard_error_in_the_right_place(together: Path, tmp_path: Path) -> None:
    alone = Trainer(device="cpu", gradients="loop").run(cases()["weighted"], out=tmp_path / "weighted")
    ratio = open_record(together / "weighted").steps["loss_se"] / alone.steps["loss_se"]
    assert 0.8 < ratio.median() < 1.25


def test_one_host_writes_one_trial_and_all_of_them_return_it(together: Path, seen: list[dict[str, Any]]) -> None:
    assert [host["rank"] for host in seen] == [0, 1]
    for name in (*cases(), "drawing"):
        assert [p.name for p in (together / name / "trials").iterdir()] == ["0"]
        states = [event["state"] for event in map(json.loads, _events(together / name)) if "state" in event]
        assert states == ["running", "complete"], "a second writer would have left events of its own"
    assert [host["steps"] for host in seen] == [40, 40], "the finished trial came from disk on both"


def test_a_checkpoint_of_many_hosts_shows_whose_statistics_it_holds(together: Path, tmp_path: Path) -> None:
    """P6.8: what the trainer writes is that of all hosts; the first host's in its place is found."""
    best = open_record(together / "local").best()
    assert best is not None
    assert best.checkpoint is not None
    model, stored = normalised().build_model().double(), load_checkpoint(best.checkpoint)
    codes = ("rank_local", "first_device_ema", "variance_of_means")
    found = diagnose_batch_norm(audit_batch_norm(model, checkpoint=best.checkpoint))
    assert [found[f"batch_norm.{code}"].status for code in codes] == ["ok"] * 3
    first = {n.removeprefix("statistics/"): t for n, t in stored.trainer.items() if n.startswith("statistics/")}
    planted = save_checkpoint(tmp_path, stored._replace(model=stored.model | first))
    found = diagnose_batch_norm(audit_batch_norm(model, checkpoint=planted))
    assert [found[f"batch_norm.{code}"].status for code in codes[:2]] == ["warn", "warn"]


def test_hosts_stop_together_where_one_is_interrupted_and_go_on(together: Path, seen: list[dict[str, Any]]) -> None:
    assert seen[0]["interrupted"] == seen[1]["interrupted"]
    assert "stopped after step 12 of 40" in seen[0]["interrupted"], "at the evaluation that comes next"
    stopped, whole = (open_record(together / name) for name in ("interrupted", "tensors"))
    np.testing.assert_array_equal(stopped.steps["loss"], whole.steps["loss"])
    np.testing.assert_array_equal(stopped.evals["value"], whole.evals["value"])


def test_what_travels_behind_a_gradient_keeps_its_bits(seen: list[dict[str, Any]]) -> None:
    for host in seen:
        assert len(host["exchanged"]) == 4
        for dtype, found in host["exchanged"].items():
            assert found["sum"] == [2.0 + 3.0] * 5, dtype
            assert found["rows"] == [[1 / 3, -1e-300, float("inf")], [2 / 3, -1e-300, float("inf")]], dtype


def test_hosts_draw_differently_and_start_alike(together: Path) -> None:
    """Dropout of 0.3 on other examples: the halves of a batch would repeat each other's masks under one seed."""
    path = latest_checkpoint(together / "drawing" / "trials" / "0" / "checkpoints")
    assert path is not None
    stored = load_checkpoint(path).trainer
    kinds = {name.removeprefix("host1/").split("/")[0] for name in stored}
    assert kinds == {"optimizer", "rng", "data", "statistics"}
    for kind in ("rng/torch", "data/torch"):
        assert not torch.equal(stored[kind], stored[f"host1/{kind}"])


def test_what_many_hosts_cannot_do_is_said_on_all_of_them(seen: list[dict[str, Any]], together: Path) -> None:
    for host in seen:
        said = host["refused"]
        assert said["uneven"].startswith("ConfigError: batch_size=9 is that of all hosts together")
        assert "Take 8 or 10" in said["uneven"]
        assert said["study"].startswith("UsageError: a study is run by one process")
        assert "host 1 differ from those on host 0" in said["weights"]
        assert said["folder"].startswith("RecordError")
    assert not (together / "study").exists()


def _events(folder: Path) -> list[str]:
    return (folder / "trials" / "0" / "events.jsonl").read_text().splitlines()
