"""One trial on several ranks, real processes over gloo: the same numbers as on one, one of them writes, and a killed one changes no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist

import workbench as wb
from tests.helpers.datasets import Stream
from tests.helpers.torchrun import torchrun
from tests.helpers.workloads import small_net
from tests.hosts.programs.together import cases, normalised
from tests.train.test_evaluation import EXAMPLES, workload_of
from workbench.errors import DataError, UsageError
from workbench.record.read import open_record
from workbench.train.checkpoint import latest_checkpoint, load_checkpoint, load_model, save_checkpoint
from workbench.train.distributed.data_parallel import (
    PartialSum,
    average_gradients,
    evaluate_shard,
    exchange_room,
    join_shards,
)
from workbench.train.distributed.process_group import HostGroup
from workbench.train.evaluation import evaluate
from workbench.train.gradients import LaneLoss

HOSTS = 2
KILLED = "tests.hosts.programs.killed"


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
    alone = wb.Trainer(device="cpu", gradients="loop").run(cases()[name], out=tmp_path / name)
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
    alone = wb.Trainer(device="cpu", gradients="loop").run(normalised(), out=tmp_path / "normalised")
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


def test_one_rank_writes_one_trial_and_all_of_them_return_it(together: Path, seen: list[dict[str, Any]]) -> None:
    assert [rank["rank"] for rank in seen] == [0, 1]
    for name in (*cases(), "drawing"):
        assert [p.name for p in (together / name / "trials").iterdir()] == ["0"]
        states = [event["state"] for event in _events(together / name) if "state" in event]
        assert states == ["running", "complete"], "a second writer would have left events of its own"
    assert [rank["steps"] for rank in seen] == [40, 40], "the finished trial came from disk on both"


def test_a_checkpoint_of_many_hosts_shows_whose_statistics_it_holds(together: Path, tmp_path: Path) -> None:
    """P6.8: what the trainer writes is that of all hosts; the first host's in its place is found."""
    best = open_record(together / "local").best()
    assert best is not None
    assert best.checkpoint is not None
    model, stored = normalised().build_model().double(), load_checkpoint(best.checkpoint)
    codes = ("rank_local", "first_device_ema", "variance_of_means")
    found = wb.batch_norm.diagnose(wb.batch_norm.audit(model, checkpoint=best.checkpoint))
    assert [found[f"batch_norm.{code}"].status for code in codes] == ["ok"] * 3
    first = {n.removeprefix("statistics/"): t for n, t in stored.trainer.items() if n.startswith("statistics/")}
    planted = save_checkpoint(tmp_path, stored._replace(model=stored.model | first))
    found = wb.batch_norm.diagnose(wb.batch_norm.audit(model, checkpoint=planted))
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
        assert said["uneven"].startswith("ConfigError: batch_size=9 is that of all ranks together")
        assert "Take 8 or 10" in said["uneven"]
        assert said["study"].startswith("UsageError: a study is run by one process")
        assert "rank 1 differ from those on rank 0" in said["weights"]
        assert said["folder"].startswith("RecordError")
    assert not (together / "study").exists()


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials" / "0" / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_killed_hosts_change_no_bit(together: Path, tmp_path: Path) -> None:
    """Weights, optimizer, dropout and noise of every host go on as they were: all of them draw in this workload."""
    torchrun(KILLED, tmp_path / "killed", tmp_path, "14,31", options=["--max-restarts=2"])
    whole, killed = open_record(together / "drawing"), open_record(tmp_path / "killed")
    resumed = [event["step"] for event in _events(killed.path) if event["event"] == "resumed"]
    assert resumed == [12, 28], "from the newest checkpoint, one every 4 steps"
    columns = ["step", "loss", "loss_se", "grad_norm", "lr"]
    pd.testing.assert_frame_equal(whole.steps[columns], killed.steps[columns], check_exact=True)
    compared = ["step", "split", "metric", "value", "num_examples"]
    pd.testing.assert_frame_equal(whole.evals[compared], killed.evals[compared], check_exact=True)
    last = "trials/0/checkpoints/step-00000040"
    for name in ("model.safetensors", "trainer.safetensors"):
        assert (whole.path / last / name).read_bytes() == (killed.path / last / name).read_bytes()


@pytest.mark.slow
def test_another_number_of_hosts_goes_on_where_the_first_was_killed(tmp_path: Path) -> None:
    """Two hosts up to step 14, then one: the losses are those of one from the start."""
    torchrun(KILLED, tmp_path / "killed", tmp_path, "14", "tensors", succeeds=False)
    trainer = wb.Trainer(device="cpu", gradients="loop")
    whole = trainer.run(cases()["tensors"], out=tmp_path / "whole")
    killed = trainer.run(cases()["tensors"], out=tmp_path / "killed")
    assert [event["step"] for event in _events(killed.path) if event["event"] == "resumed"] == [12]
    np.testing.assert_allclose(killed.steps["loss"], whole.steps["loss"], rtol=1e-9)
    np.testing.assert_allclose(killed.evals["value"], whole.evals["value"], rtol=1e-9)


def test_a_share_in_which_nothing_counts_has_no_say_and_where_none_does_nothing_is_learned(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        hosts, ignored = HostGroup(), torch.tensor([float("nan")])
        grad = torch.cat([torch.tensor([1.0, float("nan")]), torch.zeros(exchange_room(hosts))])
        joined = average_gradients(hosts, grad, LaneLoss(ignored, ignored, torch.zeros(1)), examples=2)
    finally:
        dist.destroy_process_group()
    assert grad[:2].tolist() == [0.0, 0.0]
    assert (joined.loss.item(), joined.weight.item()) == (0.0, 0.0)  # type: ignore[union-attr]


# A split shared out over ranks: each example once (P2.11).


@pytest.mark.parametrize(("shards", "batch_size"), [(1, 10), (2, 1), (4, 103), (4, 128), (103, 10), (110, 10)])
def test_one_metric_for_any_number_of_shards_and_any_batch_size(shards: int, batch_size: int) -> None:
    workload, model = workload_of(), small_net().double()
    whole = evaluate(workload, model, batch_size=EXAMPLES)
    parts = [evaluate_shard(workload, model, shard, shards, batch_size=batch_size) for shard in range(shards)]
    for one, joined in zip(whole, join_shards(parts), strict=True):
        assert joined.value == pytest.approx(one.value, rel=1e-13)
        assert (joined.metric, joined.num_examples, joined.num_correct) == (one.metric, EXAMPLES, one.num_correct)
    assert sum(part[0].num_examples for part in parts if part) == EXAMPLES


def test_weights_are_summed_and_the_mean_of_shard_means_would_differ() -> None:
    workload = workload_of(weights=lambda batch: batch[1].abs() * (batch[1] > 0))
    model = small_net().double()
    (whole, _) = evaluate(workload, model, batch_size=16)
    parts = [evaluate_shard(workload, model, shard, 4, batch_size=16) for shard in range(4)]
    (joined, _) = join_shards(parts)
    assert joined.value == pytest.approx(whole.value, rel=1e-12)
    assert joined.num_examples == whole.num_examples < EXAMPLES
    naive = np.mean([part[0].total / part[0].weight for part in parts])
    assert abs(naive - whole.value) > 1e-3 * whole.value


def test_what_cannot_be_shared_out_is_refused() -> None:
    model = small_net().double()
    with pytest.raises(UsageError, match="shard=2 must be 0 to 1"):
        evaluate_shard(workload_of(), model, 2, 2, batch_size=4)
    with pytest.raises(UsageError, match="no example with a weight above 0"):
        join_shards([[PartialSum("loss", 0.0, 0.0, 0, None, 0.1)], []])
    with pytest.raises(DataError, match="iterable only"):
        evaluate_shard(workload_of().replace(validation_data=Stream(torch.zeros(3))), model, 0, 2, batch_size=4)
