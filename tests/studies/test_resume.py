"""The resume audit names what a user's checkpoint loses, one thing or several, and is silent where nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.user_training import UserTraining, X, Y
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import UsageError
from workbench.findings.diagnosis import Finding
from workbench.topics.checkpoints.diagnose import resume_finding
from workbench.topics.checkpoints.resume import audit_resume, same_values
from workbench.topics.checkpoints.study import collect_resume
from workbench.workloads.base import Workload

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
    return audit_resume(*UserTraining(*lost, **how).functions, steps=steps, after=after)["checkpoints.resume_jump"]


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


def test_two_things_missing_at_once_are_both_named() -> None:
    assert set(audited("optimizer", "position").evidence["missing"]) == {"optimizer", "batches"}


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
    assert found.evidence["floor"] > 0


def test_a_jump_far_above_the_noise_is_still_found() -> None:
    found = audited("parameters", noise=1e-7)
    assert found.status == "fail"
    assert found.evidence["missing"] == ["model parameters"]


def test_state_outside_of_every_part_is_a_warning_without_a_name() -> None:
    found = audited(hidden=True)
    assert found.status == "warn"
    assert found.evidence["outside"] is True
    assert "none of the parts" in found.summary


def test_what_a_script_draws_when_it_starts_is_another_draw_after_a_restart() -> None:
    """An order of the data that is drawn once, from a random state that nobody seeds: the process that resumes draws its own."""

    def build() -> dict[str, Any]:
        model = torch.nn.Linear(3, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        return {"model": model, "order": torch.randperm(40), "done": 0}

    def step(parts: dict[str, Any]) -> float:
        rows = parts["order"][8 * (parts["done"] % 5) :][:8]
        loss = ((parts["model"](X[rows]) - Y[rows]) ** 2).mean()
        (slope,) = torch.autograd.grad(loss, [parts["model"].weight])
        with torch.no_grad():
            parts["model"].weight -= 0.1 * slope
        parts["done"] += 1
        return float(loss.detach())

    def load(parts: dict[str, Any], found: dict[str, Any]) -> None:
        parts["model"].load_state_dict(found["model"])
        parts["done"] = found["done"]
        if "order" in found:
            parts["order"] = found["order"]

    def saved(parts: dict[str, Any], *names: str) -> dict[str, Any]:
        return {"model": {k: v.clone() for k, v in parts["model"].state_dict().items()}, **{n: parts[n] for n in names}}

    found = audit_resume(build, step, lambda parts: saved(parts, "done"), load, steps=3, after=4)
    assert found["checkpoints.resume_jump"].evidence["missing"] == ["order"]
    whole = audit_resume(build, step, lambda parts: saved(parts, "done", "order"), load, steps=3, after=4)
    assert whole["checkpoints.resume_jump"].status == "ok"


def test_a_loss_that_is_nan_in_both_runs_is_no_jump() -> None:
    user = UserTraining()
    build, _, save, load = user.functions

    def step(parts: dict[str, Any]) -> float:
        user.step(parts)
        return float("nan")

    assert audit_resume(build, step, save, load, steps=2, after=2)["checkpoints.resume_jump"].status == "ok"


def test_the_callers_random_state_is_untouched() -> None:
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    audited("rng", steps=2, after=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


@pytest.mark.parametrize(
    ("given", "said"), [({"steps": 0}, "steps=0"), ({"after": 0}, "after=0"), ({"steps": True}, "steps=True")]
)
def test_counts_are_checked(given: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        audited(**given)


def test_parts_have_to_be_a_dict() -> None:
    with pytest.raises(UsageError, match=r"build\(\) returned list, but must return a dict"):
        audit_resume(lambda: [1], *UserTraining().functions[1:])  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("place", "function", "said"),
    [
        (0, lambda seed: {}, r"build\(seed\) cannot be called with \(\): .*build\(\) -> parts"),
        (1, lambda: 0.0, r"step\(\) cannot be called with \(parts\): .*step\(parts\) -> loss"),
        (2, lambda parts, path: None, r"save\(parts, path\) cannot be called with \(parts\): .*save\(parts\) -> checkpoint"),
        (3, lambda path: None, r"load\(path\) cannot be called with \(parts, checkpoint\): .*load\(parts, checkpoint\)"),
        (2, "checkpoint.pt", r"save='checkpoint.pt' must be a function: save\(parts\) -> checkpoint"),
    ],
)  # fmt: skip
def test_a_function_with_other_arguments_is_told_what_is_called(place: int, function: Any, said: str) -> None:
    functions: list[Any] = list(UserTraining().functions)
    functions[place] = function
    with pytest.raises(UsageError, match=said):
        audit_resume(*functions)


def test_a_function_with_defaults_of_its_own_is_taken() -> None:
    build, step, save, load = UserTraining().functions
    found = audit_resume(build, step, lambda parts, tag="a": save(parts), load, steps=2, after=1)
    assert found["checkpoints.resume_jump"].status == "ok"


def test_nobody_looked() -> None:
    assert resume_finding(None).status == "not_measured"


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


def test_a_dataset_with_random_numbers_of_its_own_cannot_be_resumed() -> None:
    base = small_workload()

    class Own(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.draws = 0

        def __len__(self) -> int:
            return len(base.train_data)

        def __getitem__(self, index: int) -> Any:
            self.draws += 1
            x, y = base.train_data[index]
            return x * (1 + 1e-3 * np.sin(self.draws)), y

    found = finding(base.replace(train_data=Own()))
    assert found.status == "not_measured"
    assert "two runs that were not stopped differ by" in found.summary, "they share the dataset, and it counts on"
    assert found.evidence["losses"] != found.evidence["losses_resumed"]


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
