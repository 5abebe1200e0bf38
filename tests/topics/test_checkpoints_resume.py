"""What a checkpoint loses is named, from the file alone and by going on from it; a whole one is left in peace (P4.2)."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import workbench as wb
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import CheckpointError, UsageError
from workbench.findings.finding import Finding
from workbench.record.json_values import dumps
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


@pytest.mark.parametrize("lost", MISSING)
def test_what_the_file_lacks_is_named_and_nothing_else(lost: str) -> None:
    _, parts, checkpoint = trained(lost)
    found = said(checkpoint, parts)
    assert (found.status, set(found.evidence["missing"])) == ("fail", MISSING[lost])
    assert all(name in found.summary for name in MISSING[lost])
    assert len(found.advice) == len(MISSING[lost])


@pytest.mark.parametrize("front", ["", "module.", "net.model."])
def test_a_whole_checkpoint_is_left_in_peace_whatever_its_names_begin_with(front: str) -> None:
    _, parts, checkpoint = trained()
    whole = dict(checkpoint)
    checkpoint["weights"] = {"inner": {front + k: v for k, v in checkpoint.pop("model").items()}}
    model = f"weights.inner{'.' * bool(front)}{front}{'*' * bool(front)}"
    found = said(checkpoint, parts)
    assert (found.status, found.value) == ("ok", 0)
    assert {row["part"]: row["where"] for row in found.evidence["parts"]} == {
        "model parameters": model, "model buffers": model, "ema parameters": "ema", "ema buffers": "ema",
        "optimizer": "optimizer", "scheduler": "scheduler", "done": "done",
    }  # fmt: skip
    del checkpoint["weights"]  # averaged weights, named alike behind `module.`, do not stand in for the model
    assert set(said(checkpoint, parts).evidence["missing"]) == {"model parameters", "model buffers"}
    del whole["model"]["4.bias"]
    assert "model parameters (4.bias)" in said(whole, parts).summary


def test_other_values_of_one_part_are_a_warning_and_of_all_an_older_checkpoint() -> None:
    user, parts, checkpoint = trained()
    later = copy.deepcopy(checkpoint)
    user.step(parts)
    assert said(later, parts).status == "ok"
    assert "another step" in said(later, parts).summary
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
    generator = torch.Generator().manual_seed(3)
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
    with pytest.raises(UsageError, match="must be a dict of what training is made of"):
        wb.checkpoints.audit({}, {"model": nn.ReLU()})


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
