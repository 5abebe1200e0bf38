"""`Workload(step=...)`: a custom step under the trainer; the twin of each is the loop that a person would write in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import workbench as wb
from tests.helpers.hooks import At
from tests.helpers.workloads import small_workload, squared
from tests.playbook.test_playbook import QUICK
from workbench.train.batches import train_batches
from workbench.train.checkpoint import load_checkpoint
from workbench.train.rng import seed_all
from workbench.train.stacked_weights import build_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_figures")
Update = Callable[[nn.Module, Any], Callable[[Any, int], torch.Tensor]]


def final(record: Any) -> dict[str, torch.Tensor]:
    return load_checkpoint(sorted((record.folder / "checkpoints").glob("step-*"))[-1]).model


def by_hand(workload: wb.Workload, write: Update, *, seeds: tuple[int, int] = (0, 0)) -> tuple[list[float], nn.Module]:
    """Train as a person would, with the trainer's initial weights, batches and random numbers."""
    config = workload.config
    model = build_model(workload, config, CPU).train()
    seed_all(*seeds)
    update, batches = write(model, config), train_batches(workload, config, CPU)
    losses = [update(next(batches)[0][0], step).item() for step in range(config.total_steps)]
    return losses, model


# ---- two optimizers, one after the other, with random numbers of their own


def pair() -> nn.Module:
    return nn.ModuleDict(
        {"makes": nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)), "tells": nn.Linear(3, 1)}
    )


def two(model: Any, lr: float) -> dict[str, torch.optim.Optimizer]:
    tells = torch.optim.Adam(model["tells"].parameters(), lr=2 * lr, betas=(0.5, 0.9))
    return {"tells": tells, "makes": torch.optim.SGD(model["makes"].parameters(), lr=lr, momentum=0.9)}


def gan_losses(model: Any, real: torch.Tensor, step_tells: Any, step_makes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ones = torch.ones(len(real), 1, dtype=real.dtype)
    fake = model["makes"](torch.randn(len(real), 2, dtype=real.dtype))
    told = F.binary_cross_entropy_with_logits(model["tells"](real), ones)
    told = told + F.binary_cross_entropy_with_logits(model["tells"](fake.detach()), 0 * ones)
    step_tells(told)
    made = F.binary_cross_entropy_with_logits(model["tells"](fake), ones)
    step_makes(made)
    return told, made


def gan_step(state: Any, batch: Any) -> dict[str, torch.Tensor]:
    def stepped(name: str) -> Any:
        def step(loss: torch.Tensor) -> None:
            state.optimizers[name].zero_grad()
            loss.backward()
            state.optimizers[name].step()

        return step

    told, made = gan_losses(state.model, batch[0], stepped("tells"), stepped("makes"))
    return {"tells": told, "makes": made}


def far(outputs: Any, batch: Any) -> torch.Tensor:
    """How far made examples lie from the origin, on average as far as real ones."""
    return (outputs.norm(dim=1) - batch[0].norm(dim=1)) ** 2


def gan(**config: Any) -> wb.Workload:
    return small_workload(
        build_model=pair, step=gan_step, loss=far, metrics={"near": lambda outputs, batch: -far(outputs, batch)},
        forward=lambda model, batch: model["makes"](batch[0][:, :2]), minimised=False,
        config={"optimizer": two, "select": "validation/near", "select_mode": "max", **config},
    )  # fmt: skip


def gan_by_hand(model: Any, config: Any) -> Callable[[Any, int], torch.Tensor]:
    optimizers = two(model, config.peak_lr)

    def stepped(name: str, step: int) -> Any:
        factor = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0

        def make(loss: torch.Tensor) -> None:
            optimizers[name].param_groups[0]["lr"] = config.peak_lr * factor * (2 if name == "tells" else 1)
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()

        return make

    def update(batch: Any, step: int) -> torch.Tensor:
        told, made = gan_losses(model, batch[0], stepped("tells", step), stepped("makes", step))
        return told.detach() + made.detach()

    return update


def cut_and_resumed(workload: wb.Workload, folder: Path) -> Any:
    with pytest.raises(KeyboardInterrupt):
        wb.Trainer(hooks=[At(23, KeyboardInterrupt())]).run(workload, out=folder)
    assert "step-00000021" in [path.name for path in folder.rglob("step-*")]
    return wb.Trainer().run(workload, out=folder)


@pytest.mark.parametrize("warmup", [0, 10])
def test_two_optimizers_train_as_by_hand_bit_for_bit(tmp_path: Path, warmup: int) -> None:
    workload = gan(warmup_steps=warmup, precision=None)
    losses, model = by_hand(workload, gan_by_hand)
    record = wb.Trainer().run(workload, out=tmp_path / "s")
    assert record.steps["loss"].tolist() == losses
    np.testing.assert_allclose(record.steps["loss"], record.steps["loss/tells"] + record.steps["loss/makes"], rtol=1e-6)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in final(record).items())
    assert record.steps["loss_se"].isna().all()
    assert record.evals.query("metric == 'near'")["step"].tolist() == list(range(0, 41, 4))


def kept_step(state: Any, batch: Any) -> torch.Tensor:
    """A loop that forgets to zero its gradients, which is to be seen and not mended."""
    loss = squared(state.model(batch[0] + 0.1 * torch.randn_like(batch[0])), batch).mean()
    loss.backward()
    state.optimizer.step()
    return loss


@pytest.mark.parametrize("case", ["two optimizers", "gradients that are left"])
def test_a_resumed_step_goes_on_bit_for_bit(tmp_path: Path, case: str) -> None:
    workload = gan(checkpoint_every_steps=7)
    if case != "two optimizers":
        config = {"optimizer": sgd, "peak_lr": 1e-3, "checkpoint_every_steps": 7}
        workload = small_workload(step=kept_step, config=config)
    whole = wb.Trainer().run(workload, out=tmp_path / "whole")
    again = cut_and_resumed(workload, tmp_path / "cut")
    columns = [c for c in whole.steps.columns if not c.endswith("_s")]
    assert again.steps[columns].equals(whole.steps[columns])
    assert all(torch.equal(t, final(whole)[name]) for name, t in final(again).items())


# ---- a closure


def lbfgs(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=lr, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


def lbfgs_step(state: Any, batch: Any) -> torch.Tensor:
    def closure() -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = squared(state.model(batch[0]), batch).mean()
        loss.backward()
        return loss

    return state.optimizer.step(closure)


def test_lbfgs_trains_as_by_hand_and_resumes_with_its_history(tmp_path: Path) -> None:
    workload = small_workload(
        step=lbfgs_step, config={"optimizer": lbfgs, "peak_lr": 0.5, "precision": None, "checkpoint_every_steps": 7}
    )
    norms = []

    def write(model: nn.Module, config: Any) -> Callable[[Any, int], torch.Tensor]:
        optimizer = lbfgs(model.parameters(), config.peak_lr)

        def update(batch: Any, step: int) -> torch.Tensor:
            first = []

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = squared(model(batch[0]), batch).mean()
                loss.backward()
                first.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
                return loss

            loss = optimizer.step(closure)
            norms.append(first[0])
            return loss

        return update

    losses, model = by_hand(workload, write)
    record = wb.Trainer().run(workload, out=tmp_path / "s")
    assert record.steps["loss"].tolist() == losses
    np.testing.assert_allclose(record.steps["grad_norm"], norms, rtol=1e-6)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in final(record).items())
    assert cut_and_resumed(workload, tmp_path / "cut").steps["loss"].tolist() == losses


# ---- what the built-in step does too: its twin is the trainer without step=


def plain_step(state: Any, batch: Any) -> torch.Tensor:
    state.optimizer.zero_grad()
    with state.autocast():
        loss = squared(state.model(batch[0]), batch).mean()
    state.scaler.scale(loss).backward()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    return loss


def sgd(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def clipped_step(state: Any, batch: Any) -> torch.Tensor:
    state.optimizer.zero_grad()
    loss = squared(state.model(batch[0]), batch).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 0.5)
    state.optimizer.step()
    return loss


CASES = {
    "plain": (plain_step, {}),
    "clipped by the trainer": (plain_step, {"max_grad_norm": 0.5}),
    "clipped by the step": (clipped_step, {"max_grad_norm": 0.5}),
    "float16": (plain_step, {"precision": "float16", "peak_lr": 0.01}),
    "a scheduler that moves momentum": (
        plain_step,
        {"schedule": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [g["lr"] for g in optimizer.param_groups], total_steps=40)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_step_as_the_trainer_makes_it_is_recorded_as_the_trainer_records_it(tmp_path: Path, case: str) -> None:
    step, config = CASES[case]
    built_in = wb.Trainer().run(small_workload(config={"optimizer": sgd, **config}), out=tmp_path / "built-in")
    if case == "clipped by the step":
        config = {}
    own = wb.Trainer().run(small_workload(step=step, config={"optimizer": sgd, **config}), out=tmp_path / "own")
    for name in ("loss", "grad_norm", "lr", "clipped", "update_norm", "param_norm"):
        np.testing.assert_allclose(own.steps[name], built_in.steps[name], rtol=2e-4, err_msg=name)
    assert own.evals["value"].to_numpy() == pytest.approx(built_in.evals["value"].to_numpy(), rel=1e-4)
    if case.startswith("clipped"):
        assert 0 < own.steps["clipped"].sum() < 40
    if case == "float16":
        assert own.steps["skipped"].tolist() == built_in.steps["skipped"].tolist()
        assert own.steps["loss_scale"].tolist() == built_in.steps["loss_scale"].tolist()


def test_an_update_whose_scaled_gradient_overflows_is_skipped_and_said(tmp_path: Path) -> None:
    workload = small_workload(
        step=plain_step,
        config={"optimizer": sgd, "precision": "float16", "peak_lr": 1e-3},
    )

    def large(state: Any, batch: Any) -> torch.Tensor:
        return plain_step(state, [batch[0], batch[1] + (300.0 if state.index < 3 else 0.0)])

    steps = wb.Trainer().run(workload.replace(step=large), out=tmp_path / "s").steps
    assert steps["skipped"].tolist()[:2] == [1.0, 1.0]
    assert steps["loss_scale"].tolist()[:3] == [2.0**16, 2.0**15, 2.0**14]
    assert np.isinf(steps["grad_norm"][0])
    assert steps["skipped"].iloc[-1] == 0
    assert steps["update_norm"][0] == 0


# ---- what cannot be

STEPS = {
    "nothing": (lambda state, batch: plain_step(state, batch) and None, r"returned NoneType where a loss belongs.*Return a scalar"),
    "a loss of each example": (
        lambda state, batch: plain_step(state, batch).expand(8), r"tensor of shape \(8,\) where a loss belongs"),
    "something in a dict": (
        lambda state, batch: {"a": plain_step(state, batch), "b": "no"}, r"returned str of 'b' where a loss belongs"),
    "no step": (lambda state, batch: squared(state.model(batch[0]), batch).mean(), r"stepped no optimizer.*state.optimizer.step\(\)"),
    "an error": (lambda state, batch: state.modle, r"small.*at step 0.*step\(state, batch\) raised AttributeError.*modle"),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_a_step_that_makes_no_update_or_tells_no_loss_is_an_error_that_says_what_to_do(
    tmp_path: Path, case: str
) -> None:
    step, said = STEPS[case]
    with pytest.raises(wb.errors.WorkloadError, match=said):
        wb.Trainer().run(small_workload(step=step, config={"optimizer": sgd}), out=tmp_path / "s")


CONFIGS = {
    "a rule by its name": ({"optimizer": "adam"}, {}, r"optimizer='adam' is the name of a rule.*Write optimizer=lambda"),
    "no optimizer": ({"optimizer": lambda model, lr: [None]}, {}, r"returned NoneType.*a list, a tuple or a dict"),
    "micro-batches": ({"optimizer": sgd, "accumulate_steps": 2}, {}, r"accumulate_steps=2.*divide the batch inside"),
    "one traced program": ({"optimizer": sgd}, {"gradients": "vmap"}, r"one trial at a time.*not with gradients='vmap'"),
    "a precision that it ignores": ({"optimizer": sgd, "precision": "bfloat16"}, {}, r"no effect.*state.autocast\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_what_a_step_cannot_have_is_refused(tmp_path: Path, case: str) -> None:
    config, how, said = CONFIGS[case]
    with pytest.raises(wb.errors.ConfigError, match=said):
        wb.Trainer(**how).run(small_workload(step=clipped_step, config=config), out=tmp_path / "s")
    with pytest.raises(wb.errors.WorkloadError, match="step must be callable, not str"):
        small_workload(step="train")


def test_nothing_of_the_step_stays_in_torch(tmp_path: Path) -> None:
    before = torch.autograd.backward, torch.nn.utils.clip_grad_norm_
    wb.Trainer().run(small_workload(step=clipped_step, config={"optimizer": sgd, "total_steps": 3}), out=tmp_path / "s")
    with pytest.raises(wb.errors.WorkloadError):
        wb.Trainer().run(small_workload(step=STEPS["no step"][0], config={"optimizer": sgd}), out=tmp_path / "f")
    assert (torch.autograd.backward, torch.nn.utils.clip_grad_norm_) == before


# ---- the studies


def held_out(step: Any, **config: Any) -> wb.Workload:
    data = small_workload(examples=160).train_data
    parts = {
        "train_data": torch.utils.data.Subset(data, range(96)),
        "validation_data": torch.utils.data.Subset(data, range(96, 160)),
    }
    return small_workload(step=step, **parts, config={"total_steps": 120, "optimizer": sgd, **config})


def test_a_diagnosis_of_a_step_ends_in_a_verdict_and_finds_a_learning_rate_that_is_too_high(tmp_path: Path) -> None:
    found = wb.diagnose(held_out(clipped_step, peak_lr=3.0), out=tmp_path / "s", proof_seeds=2)
    assert found.verdict == "fail"
    assert found["lr.too_high"].status == "fail"
    assert found.recommendation["adopted"]
    assert found.recommendation["config"]["peak_lr"] < 1.0
    trials = wb.open(tmp_path / "s").trials
    assert set(trials["lanes"].dropna()) == {1}
    assert set(trials["gradients"].dropna()) == {"step"}
    for code in ("batch_size.noise_scale", "loss.broadcast", "optimizers.constants", "loop.unowned_parameters"):
        assert found[code].status == "not_measured"
        assert "a custom step, and this takes the gradient of a loss" in found[code].summary
    assert found["loop.no_update"].status == "ok"


def test_a_diagnosis_of_a_healthy_step_finds_nothing(tmp_path: Path) -> None:
    found = wb.diagnose(held_out(plain_step), out=tmp_path / "s", **QUICK)
    assert {f.code for f in found if f.status in ("warn", "fail")} == set()


def test_parameters_that_no_optimizer_of_a_step_has_are_seen(tmp_path: Path) -> None:
    workload = held_out(plain_step, optimizer=lambda model, lr: torch.optim.SGD(model[3].parameters(), lr))
    found = wb.diagnose(workload, out=tmp_path / "s", **QUICK)
    assert found["loop.no_update"].status == "fail"
    assert "0.weight" in found["loop.no_update"].summary


@pytest.mark.parametrize(
    "workload",
    [gan(), small_workload(step=lbfgs_step, config={"optimizer": lbfgs, "peak_lr": 0.5})],
    ids=["gan", "lbfgs"],
)
def test_a_diagnosis_of_several_optimizers_and_of_a_closure_comes_to_its_end(
    tmp_path: Path, workload: wb.Workload
) -> None:
    found = wb.diagnose(workload, out=tmp_path / "s", **QUICK)
    assert (tmp_path / "s" / "report.html").exists()
    assert found["loop.no_gradient"].status == "ok"
    assert (found["lr.best"].value is None) == (not workload.minimised)


def test_studies_that_a_step_has_no_place_in_say_so(tmp_path: Path) -> None:
    with pytest.raises(
        wb.errors.ConfigError, match="optimizers cannot be exchanged for rules by name: diagnose it with each factory"
    ):
        wb.optimizers.Study(optimizers=("adam",)).run(held_out(plain_step), out=tmp_path / "rules")
    with pytest.raises(wb.errors.ConfigError, match="in one process, not with 2 workers"):
        wb.ps.Trainer(workers=2).run(held_out(plain_step), out=tmp_path / "ps")
    sizes = wb.batch_size.Study(batch_sizes=(4,), retune=False, choosing_seeds=1, seeds=2).run(
        held_out(plain_step, total_steps=10), out=tmp_path / "sizes"
    )
    assert set(sizes.trials["batch_size"]) == {4, 8}
