"""What a checkpoint of a user's own does not hold is named from the file alone; a whole one is left in peace (P4.2)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.helpers.user_training import EVERYTHING, UserTraining
from workbench.errors import CheckpointError, UsageError
from workbench.findings.diagnosis import Finding
from workbench.record.json_values import dumps
from workbench.topics.checkpoints.resume import audit_checkpoint

MISSING = {
    "parameters": {"model parameters"},
    "buffers": {"model buffers"},
    "optimizer": {"optimizer"},
    "scheduler": {"scheduler"},
    "rng": {"random state"},
    "ema": {"ema parameters", "ema buffers"},
}


def trained(*lost: str, steps: int = 3) -> tuple[UserTraining, dict[str, Any], dict[str, Any]]:
    """A user's training, its parts after some steps, and the checkpoint that it saves there."""
    user = UserTraining(*lost)
    torch.manual_seed(0)
    parts = user.build()
    for _ in range(steps):
        user.step(parts)
    return user, parts, user.save(parts)


def said(checkpoint: Any, parts: Any) -> Finding:
    (finding,) = audit_checkpoint(checkpoint, parts)
    assert (finding.code, finding.clause) == ("checkpoints.resume_jump", "P4.2")
    assert finding.advice or finding.status == "ok"
    dumps(finding.to_dict())
    return finding


def test_a_whole_checkpoint_is_left_in_peace() -> None:
    _, parts, checkpoint = trained()
    found = said(checkpoint, parts)
    assert (found.status, found.value) == ("ok", 0)
    where = {row["part"]: row["where"] for row in found.evidence["parts"]}
    assert where == {
        "model parameters": "model", "model buffers": "model", "ema parameters": "ema", "ema buffers": "ema",
        "optimizer": "optimizer", "scheduler": "scheduler", "done": "done",
    }  # fmt: skip


@pytest.mark.parametrize("lost", MISSING)
def test_what_is_missing_is_named_and_nothing_else(lost: str) -> None:
    _, parts, checkpoint = trained(lost)
    found = said(checkpoint, parts)
    assert found.status == "fail"
    assert set(found.evidence["missing"]) == MISSING[lost]
    assert all(name in found.summary for name in MISSING[lost])
    assert len(found.advice) == len(MISSING[lost])


def test_averaged_weights_do_not_stand_in_for_the_model() -> None:
    """Their names are those of the model behind `module.`, and a search by name alone would take one for the other."""
    _, parts, checkpoint = trained()
    del checkpoint["model"]
    assert set(said(checkpoint, parts).evidence["missing"]) == {"model parameters", "model buffers"}


@pytest.mark.parametrize("front", ["module.", "_orig_mod.", "net.model."])
def test_names_with_something_in_front_are_the_same_names(front: str) -> None:
    _, parts, checkpoint = trained()
    checkpoint["weights"] = {"inner": {front + k: v for k, v in checkpoint.pop("model").items()}}
    found = said(checkpoint, parts)
    assert found.status == "ok"
    assert {row["where"] for row in found.evidence["parts"] if row["part"].startswith("model")} == {
        f"weights.inner.{front}*"
    }


def test_one_layer_that_is_missing_is_named() -> None:
    _, parts, checkpoint = trained()
    del checkpoint["model"]["4.bias"]
    found = said(checkpoint, parts)
    assert found.evidence["missing"] == ["model parameters"]
    assert "model parameters (4.bias)" in found.summary


def test_an_optimizer_that_was_saved_before_its_first_step_is_missing() -> None:
    user, parts, checkpoint = trained()
    checkpoint["optimizer"] = user.build()["optimizer"].state_dict()
    assert said(checkpoint, parts).evidence["missing"] == ["optimizer"]


def test_other_values_of_one_part_are_a_warning_and_of_all_an_older_checkpoint() -> None:
    user, parts, checkpoint = trained()
    later = copy.deepcopy(checkpoint)
    user.step(parts)
    assert said(later, parts).status == "ok"
    assert "another moment" in said(later, parts).summary
    mixed = {**user.save(parts), "optimizer": later["optimizer"]}
    found = said(mixed, parts)
    assert (found.status, found.evidence["other_values"]) == ("warn", ["optimizer"])


def test_what_has_nothing_to_lose_is_not_missed() -> None:
    """Plain SGD at its first learning rate, and a scaler that is off: both are made anew as they were."""
    model = nn.Linear(2, 1)
    parts = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
    }
    checkpoint = {"model": model.state_dict(), "rng": torch.get_rng_state()}
    assert said(checkpoint, parts).status == "ok"
    schedule = torch.optim.lr_scheduler.ExponentialLR(parts["optimizer"], gamma=0.5)
    parts["optimizer"].step()
    schedule.step()
    assert said(checkpoint, parts).evidence["missing"] == ["optimizer"]


def test_random_state_matters_where_the_model_draws_and_is_a_warning_elsewhere() -> None:
    model = nn.Linear(2, 1)
    assert said({"model": model.state_dict()}, {"model": model}).status == "warn"
    drops = nn.Sequential(model, nn.Dropout(0.1))
    assert said({"model": drops.state_dict()}, {"model": drops}).evidence["missing"] == ["random state"]


def test_a_generator_and_a_counter_under_another_name() -> None:
    model, generator = nn.Linear(2, 1), torch.Generator().manual_seed(3)
    parts = {"model": model, "order": generator, "epoch": 17}
    checkpoint = {"state": model.state_dict(), "rng": [torch.get_rng_state(), generator.get_state()], "at": 17}
    assert said(checkpoint, parts).status == "ok"
    found = said({"state": model.state_dict(), "rng": torch.zeros(3)}, parts)
    assert set(found.evidence["missing"]) == {"order", "epoch"}


def test_files_are_read_without_running_what_is_in_them(tmp_path: Path) -> None:
    _, parts, checkpoint = trained()
    checkpoint["rng"] = checkpoint["rng"][0]
    torch.save(checkpoint, tmp_path / "c.pt")
    assert said(tmp_path / "c.pt", parts).status == "ok"
    save_file(checkpoint["model"], tmp_path / "m.safetensors")
    found = said(str(tmp_path / "m.safetensors"), {"model": parts["model"], "optimizer": parts["optimizer"]})
    assert set(found.evidence["missing"]) == {"optimizer", "random state"}

    class Harm:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was run",))

    torch.save({"model": Harm()}, tmp_path / "bad.pt")
    for name in ("bad.pt", "nothing.pt"):
        with pytest.raises(CheckpointError, match=rf"cannot read .*{name} without running what is in it"):
            audit_checkpoint(tmp_path / name, parts)


@pytest.mark.parametrize("parts", [{}, [1], {"model": None}, {"model": nn.ReLU()}])
def test_parts_without_a_state_are_refused(parts: Any) -> None:
    with pytest.raises(UsageError, match="must be a dict of what training is made of"):
        audit_checkpoint({}, parts)


def test_nothing_is_changed_and_every_part_is_known() -> None:
    user, parts, checkpoint = trained()
    before, state = copy.deepcopy(checkpoint), torch.get_rng_state()
    said(checkpoint, parts)
    assert torch.equal(state, torch.get_rng_state())
    assert said(before, parts).status == "ok"
    assert set(MISSING) | {"position"} == set(EVERYTHING)
    assert user.kept == EVERYTHING
