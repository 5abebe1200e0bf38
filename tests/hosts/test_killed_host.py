"""A host that is killed in mid-run: torchrun starts all again, and the result is bit for bit that of the run without the kill."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.helpers.torchrun import torchrun
from tests.hosts.programs.together import cases
from workbench.record.read import open_record
from workbench.train.trainer import Trainer

PROGRAM = "tests.hosts.programs.killed"


@pytest.mark.slow
@pytest.mark.parametrize("step", [14, 31])
def test_a_killed_host_changes_no_bit(step: int, tmp_path: Path) -> None:
    """Weights, optimizer, dropout and noise of every host go on as they were: all of them draw in this workload."""
    marker = tmp_path / "killed"
    torchrun(PROGRAM, tmp_path / "whole", marker, "-1")
    assert not marker.exists()
    torchrun(PROGRAM, tmp_path / "killed-once", marker, str(step), options=["--max-restarts=1"])
    assert marker.exists()
    whole, killed = (open_record(tmp_path / name) for name in ("whole", "killed-once"))
    events = [json.loads(line) for line in (killed.path / "trials/0/events.jsonl").read_text().splitlines()]
    resumed = [event for event in events if event["event"] == "resumed"]
    assert [event["step"] for event in resumed] == [step // 4 * 4], "from the newest checkpoint, one every 4 steps"
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
    torchrun(PROGRAM, tmp_path / "killed", tmp_path / "marker", "14", "tensors", succeeds=False)
    trainer = Trainer(device="cpu", gradients="loop")
    whole = trainer.run(cases()["tensors"], out=tmp_path / "whole")
    killed = trainer.run(cases()["tensors"], out=tmp_path / "killed")
    events = [json.loads(line) for line in (killed.path / "trials/0/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [12]
    np.testing.assert_allclose(killed.steps["loss"], whole.steps["loss"], rtol=1e-9)
    np.testing.assert_allclose(killed.evals["value"], whole.evals["value"], rtol=1e-9)
