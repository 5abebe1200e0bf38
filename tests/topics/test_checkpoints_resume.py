"""What a checkpoint loses is named, from the file alone and by going on from it; a whole one is left in peace (P4.2)."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from tests.helpers.user_training import UserTraining
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import CheckpointError, UsageError
from workbench.findings.finding import Finding
from workbench.record.json_values import dumps
from workbench.topics.checkpoints.diagnose import resume_finding
from workbench.topics.checkpoints.resume import same_values
from workbench.topics.checkpoints.study import collect_resume
from workbench.workloads.base import Workload

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
    (finding,) = wb.checkpoints.audit(checkpoint, parts)
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
def test_what_the_file_lacks_is_named_and_nothing_else(lost: str) -> None:
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


@pytest.mark.parametrize("front", ["module.", "net.model."])
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
    assert said({"model": model.state_dict()}, {"model": model}).status == "warn", "no random state"
    drops = nn.Sequential(model, nn.Dropout(0.1))
    assert said({"model": drops.state_dict()}, {"model": drops}).evidence["missing"] == ["random state"]
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
            wb.checkpoints.audit(tmp_path / name, parts)


PLANTED = {
    "parameters": "model parameters",
    "buffers": "model buffers",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "position": "batches",
    "rng": "random state",
    "ema": "ema parameters",
}


def audited(*lost: str, steps: int = 7, after: int = 6, **how: Any) -> Finding:
    return wb.checkpoints.audit_resume(*UserTraining(*lost, **how).functions, steps=steps, after=after)[
        "checkpoints.resume_jump"
    ]


@pytest.mark.parametrize("lost", PLANTED)
def test_what_is_missing_is_named_and_nothing_else(lost: str) -> None:
    found = audited(lost)
    assert (found.status, found.clause) == ("fail", "P4.2")
    wanted = {PLANTED[lost], "ema buffers"} if lost == "ema" else {PLANTED[lost]}
    assert set(found.evidence["missing"]) == wanted
    assert PLANTED[lost] in found.summary
    assert len(found.advice) == len(wanted)


def test_the_healthy_twin_is_bit_for_bit_the_same() -> None:
    found = audited()
    assert found.status == "ok"
    assert found.evidence["losses"] == found.evidence["losses_resumed"]
    assert len(found.evidence["losses"]) == 6
    assert found.value == 0


def test_the_jump_is_where_it_shows() -> None:
    """The first update after a restart sees the same weights and the same batch: only the second loss can show the optimizer."""
    found = audited("optimizer")
    assert found.evidence["first_step"] == 1
    assert found.step == 8
    assert found.value == max(
        abs(a - b) for a, b in zip(found.evidence["losses"], found.evidence["losses_resumed"], strict=True)
    )
    assert audited("position").step == 7
    unseen = audited("buffers")
    assert unseen.step is None
    assert unseen.evidence["changed"] == ["model", "ema"], "averages follow the buffers of what they average"
    assert "the losses agree, but model, ema end with other values" in unseen.summary


def test_training_that_does_not_repeat_itself_is_not_called_a_jump() -> None:
    found = audited(noise=1e-3)
    assert found.status == "not_measured"
    assert "two runs that were not stopped differ by" in found.summary
    assert found.threshold == pytest.approx(10 * found.evidence["floor"])
    sharp = audited("parameters", noise=1e-7)
    assert (sharp.status, sharp.evidence["missing"]) == ("fail", ["model parameters"]), "far above the noise"


def test_state_outside_of_every_part_is_a_warning_without_a_name() -> None:
    found = audited(hidden=True)
    assert found.status == "warn"
    assert found.evidence["outside"] is True
    assert "none of the parts" in found.summary


def test_the_callers_random_state_is_untouched() -> None:
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    audited("rng", steps=2, after=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


@pytest.mark.parametrize(
    ("place", "function", "said"),
    [
        (0, lambda seed: {}, r"build\(seed\) cannot be called with \(\): .*build\(\) -> parts"),
        (2, lambda parts, path: None, r"save\(parts, path\) cannot be called with \(parts\): .*save\(parts\) -> checkpoint"),
        (2, "checkpoint.pt", r"save='checkpoint.pt' must be a function: save\(parts\) -> checkpoint"),
    ],
)  # fmt: skip
def test_a_function_with_other_arguments_is_told_what_is_called(place: int, function: Any, said: str) -> None:
    functions: list[Any] = list(UserTraining().functions)
    functions[place] = function
    with pytest.raises(UsageError, match=said):
        wb.checkpoints.audit_resume(*functions)
    with pytest.raises(UsageError, match="steps=0"):
        audited(steps=0)
    with pytest.raises(UsageError, match="must be a dict of what training is made of"):
        wb.checkpoints.audit({}, {"model": nn.ReLU()})


def test_values_are_compared_bit_for_bit() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_values({"a": [nan, 1.0]}, {"a": [nan.clone(), 1.0]})
    assert not same_values({"a": [nan, 1.0]}, {"a": [nan, 1.5]})
    assert not same_values({"a": nan}, {"b": nan})
    assert not same_values(nan, torch.tensor([1.0]))
    assert not same_values([1], [1, 2])
    assert same_values(float("nan"), float("nan"))


def finding(workload: Workload) -> Finding:
    return resume_finding(collect_resume(workload, workload.config, torch.device("cpu")))


def test_our_own_trainer_goes_on_bit_for_bit() -> None:
    workload = small_workload(build_model=lambda: small_net(0.3), config={"optimizer": "adam", "schedule": "cosine"})
    assert finding(workload).status == "ok"


def test_a_model_that_counts_outside_of_its_state_cannot_be_resumed() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = torch.nn.Linear(3, 1), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            return self.linear(x) * (1 + self.calls)

    found = finding(small_workload(build_model=Counts))
    assert found.status == "warn"
    assert found.step is not None
    assert found.step >= 4
