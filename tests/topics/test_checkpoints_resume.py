"""What a checkpoint loses is named by going on from it; a whole one is left in peace (P4.2)."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import workbench as wb
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import UsageError
from workbench.findings.finding import Finding
from workbench.topics.checkpoints.diagnose import resume_finding
from workbench.topics.checkpoints.study import collect_resume
from workbench.workloads.base import Workload

EVERYTHING = frozenset({"parameters", "buffers", "optimizer", "scheduler", "position", "rng", "ema"})
X = torch.randn(40, 3, generator=torch.Generator().manual_seed(5))
Y = torch.sin(X.sum(1, keepdim=True))


def epochs(start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 8, a new order in each epoch, which its number decides; from batch `start` on."""
    for number in itertools.count(start):
        epoch, place = divmod(number, 5)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
        rows = order[8 * place : 8 * place + 8]
        yield X[rows], Y[rows]


class UserTraining:
    """A loop as a user may write one; `noise` is added by a generator that nothing seeds, `hidden` is state outside of all parts."""

    def __init__(self, *lost: str, noise: float = 0.0, hidden: bool = False) -> None:
        self.kept = EVERYTHING - set(lost)
        self.noise, self.hidden = noise, hidden
        self._unseeded = np.random.default_rng()

    def build(self) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if self.hidden:
            model.scale = 1.0  # no buffer, no parameter: no state dict knows of it
        return {
            "model": model, "optimizer": optimizer, "scheduler": schedule, "batches": epochs(), "ema": ema, "done": 0,
        }  # fmt: skip

    def step(self, parts: dict[str, Any]) -> float:
        model = parts["model"]
        x, y = next(parts["batches"])
        loss = ((model(x) - y) ** 2).mean() * getattr(model, "scale", 1.0)
        parts["optimizer"].zero_grad()
        loss.backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
        parts["ema"].update_parameters(model)
        parts["done"] += 1
        if self.hidden:
            model.scale *= 0.9
        if self.noise:
            with torch.no_grad():
                model[4].bias += self.noise * self._unseeded.standard_normal()
        return float(loss.detach())

    def save(self, parts: dict[str, Any]) -> dict[str, Any]:
        model = parts["model"]
        weights = dict(model.named_parameters())
        state = {
            k: v for k, v in model.state_dict().items() if ("parameters" if k in weights else "buffers") in self.kept
        }
        found: dict[str, Any] = {"model": state, "done": parts["done"]}
        found |= {name: parts[name].state_dict() for name in ("optimizer", "scheduler", "ema") if name in self.kept}
        if "rng" in self.kept:
            found["rng"] = (torch.get_rng_state(), random.getstate(), np.random.get_state())
        return copy.deepcopy(found)

    def load(self, parts: dict[str, Any], found: dict[str, Any]) -> None:
        parts["model"].load_state_dict(found["model"], strict=False)
        for name in {"optimizer", "scheduler", "ema"} & set(found):
            parts[name].load_state_dict(found[name])
        parts["done"] = found["done"]
        if "position" in self.kept:
            parts["batches"] = epochs(found["done"])
        if "rng" in found:
            torch.set_rng_state(found["rng"][0])
            random.setstate(found["rng"][1])
            np.random.set_state(found["rng"][2])

    @property
    def functions(self) -> tuple[Any, Any, Any, Any]:
        return self.build, self.step, self.save, self.load


MISSING = {
    "parameters": {"model parameters"},
    "buffers": {"model buffers"},
    "optimizer": {"optimizer"},
    "scheduler": {"scheduler"},
    "rng": {"random state"},
    "ema": {"ema parameters", "ema buffers"},
}


def audited(*lost: str, steps: int = 7, after: int = 6, **how: Any) -> Finding:
    return wb.checkpoints.audit_resume(*UserTraining(*lost, **how).functions, steps=steps, after=after)[
        "checkpoints.resume_jump"
    ]


@pytest.mark.parametrize("lost", [*MISSING, "position"])
def test_what_a_resumed_run_lacks_is_named_and_nothing_else(lost: str) -> None:
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    found, wanted = audited(lost), MISSING.get(lost, {"batches"})
    assert (found.status, found.clause, set(found.evidence["missing"])) == ("fail", "P4.2", wanted)
    assert len(found.advice) == len(wanted)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_a_whole_checkpoint_goes_on_bit_for_bit_and_a_part_that_no_step_moves_is_missed_all_the_same() -> None:
    found = audited()
    assert (found.status, found.value, len(found.evidence["losses"])) == ("ok", 0, 6)
    assert found.evidence["losses"] == found.evidence["losses_resumed"]
    user = UserTraining()

    def build() -> dict[str, Any]:
        return {"projection": nn.Linear(3, 3)} | user.build()  # drawn anew by a process that begins with another seed

    def step(parts: dict[str, Any]) -> float:
        return user.step(parts) + float(parts["projection"].weight.detach().sum())

    lost = wb.checkpoints.audit_resume(build, step, user.save, user.load, steps=7, after=2)["checkpoints.resume_jump"]
    assert lost.evidence["missing"] == ["projection parameters"]


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
    outside = audited(hidden=True)
    assert (outside.status, outside.evidence["outside"]) == ("warn", True), "state that is in none of the parts"
    sharp = audited("parameters", noise=1e-7)
    assert (sharp.status, sharp.evidence["missing"]) == ("fail", ["model parameters"]), "far above the noise"


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
