"""What a loop of one's own has and a `Workload` takes: the twin of each is that loop in plain PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.helpers.hooks import At
from tests.helpers.workloads import small_workload, squared
from tests.playbook.test_playbook import QUICK
from workbench.train.batches import train_batches
from workbench.train.stacked_weights import build_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_figures")


def own_loop(workload: wb.Workload, optimizer_of: Any, *, scheduler_of: Any = None) -> tuple[list[float], nn.Module]:
    """Train as a person would, and return the losses and the model; one micro-batch an update."""
    config = workload.config
    model = build_model(workload, config, CPU)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    batches, losses = train_batches(workload, config, CPU), []
    for _ in range(config.total_steps):
        ((batch, _),) = next(batches)
        optimizer.zero_grad()
        loss = squared(model(batch[0]), batch).mean()
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses, model


def mean_loss(outputs: Any, batch: Any) -> torch.Tensor:
    return squared(outputs, batch).mean()


def test_a_loss_of_one_value_a_batch_trains_as_in_ones_own_loop(tmp_path: Path) -> None:
    """The validation loss of its 13 examples is the mean over the parts of 8 and of 5, by their sizes."""
    workload = small_workload(loss=mean_loss, config={"optimizer": "sgd"})
    losses, model = own_loop(workload, lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
    record = wb.Trainer(track=2).run(workload, out=tmp_path / "s")
    np.testing.assert_allclose(record.steps["loss"], losses, rtol=1e-6)
    assert record.steps["loss_se"].isna().all()
    last = record.evals[(record.evals["step"] == 40) & (record.evals["metric"] == "loss")]
    x, y = (t.double() for t in workload.validation_data.tensors)
    assert last["value"].item() == pytest.approx(float(mean_loss(model(x), (x, y)).detach()), rel=1e-5)
    assert record.predictions["loss"].isna().all(), "no example has a loss of its own"
    assert record.predictions["prediction"].notna().all()


def test_micro_batches_of_a_loss_of_one_value_weigh_as_their_examples(tmp_path: Path) -> None:
    whole, parts = (
        wb.Trainer().run(small_workload(loss=mean_loss, config={"accumulate_steps": k}), out=tmp_path / str(k)).steps
        for k in (1, 4)
    )
    np.testing.assert_allclose(parts["loss"], whole["loss"], rtol=1e-5)
    np.testing.assert_allclose(parts["grad_norm"], whole["grad_norm"], rtol=1e-5)
    assert parts["loss_se"].isna().all()


def test_what_takes_a_loss_of_each_example_says_that_there_is_none(tmp_path: Path) -> None:
    found = {f.code: f for f in wb.diagnose(small_workload(loss=mean_loss), out=tmp_path / "s", **QUICK)}
    for code in ("batch_size.noise_scale", "evaluation.weighting", "evaluation.coverage"):
        assert found[code].status == "not_measured"
        assert "one value per batch" in found[code].summary, code
    assert found["lr.best"].value is not None
    assert "one value per batch" in found["evaluation.batch_size"].summary
    with pytest.raises(wb.errors.UsageError, match=r"one value per batch.*metric="):
        wb.evaluation.check(lambda model, data, batch_size: math.nan, small_workload(loss=mean_loss))


def decayed(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """As nanoGPT's `configure_optimizers`: weights decay, biases do not, and the first layer has a smaller rate."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [named["3.bias"]], "weight_decay": 0.0},
        {"params": [named["0.bias"]], "weight_decay": 0.0, "lr": lr / 10},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def named_decayed(named_parameters: Any, lr: float) -> torch.optim.Optimizer:
    groups = [{"params": [p], "weight_decay": 0.1 * n.endswith("weight")} for n, p in named_parameters]
    return torch.optim.AdamW(groups, lr=lr)


FACTORIES = {
    "the model": (decayed, lambda model: decayed(model, 0.05)),
    "parameters with names": (named_decayed, lambda model: named_decayed(model.named_parameters(), 0.05)),
    "torch's own with names": (
        lambda named_parameters, lr: torch.optim.AdamW(named_parameters, lr, weight_decay=0.1),
        lambda model: torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("case", FACTORIES)
def test_a_factory_is_given_what_it_asks_for(tmp_path: Path, case: str) -> None:
    factory, own = FACTORIES[case]
    workload = small_workload(config={"optimizer": factory})
    losses, _ = own_loop(workload, own)
    alone = wb.Trainer().run(workload, out=tmp_path / "s")
    np.testing.assert_allclose(alone.steps["loss"], losses, rtol=1e-6)
    lanes = wb.lr_sweep.Study(lrs=(0.02, 0.05)).run(workload, out=tmp_path / "lanes")
    (number,) = lanes.trials.loc[lanes.trials["peak_lr"] == 0.05, "trial"]
    assert lanes.trial(int(number)).steps["loss"].tolist() == alone.steps["loss"].tolist()


def test_layer_decay_as_timm_writes_it_counts(tmp_path: Path) -> None:
    """A group with lr_scale 0 stands still; its twin is a group of lr 0."""

    def factory(model: nn.Module, lr: float, key: str = "lr_scale", value: float = 0.0) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first], key: value, "names": ["0.weight"]}, {"params": rest}], lr=lr)

    with_scale, with_lr = (
        wb.Trainer().run(small_workload(config={"optimizer": f}), out=tmp_path / str(i)).steps["loss"].tolist()
        for i, f in enumerate([factory, lambda model, lr: factory(model, lr, "lr")])
    )
    assert with_scale == with_lr
    plain = wb.Trainer().run(small_workload(config={"optimizer": "sgd"}), out=tmp_path / "p").steps["loss"].tolist()
    assert with_scale != plain


schedulers = torch.optim.lr_scheduler


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.OneCycleLR(optimizer, [g["lr"] for g in optimizer.param_groups], total_steps=40)


SCHEDULES = {
    "one cycle, momentum and groups": (one_cycle, decayed),
    "steps": (lambda optimizer: schedulers.StepLR(optimizer, 7, 0.5), "momentum"),
    "restarts, in a chain": (
        lambda optimizer: schedulers.SequentialLR(
            optimizer,
            [schedulers.LinearLR(optimizer, 0.1, total_iters=5), schedulers.CosineAnnealingWarmRestarts(optimizer, 8)],
            milestones=[5],
        ),
        lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    ),
}


@pytest.mark.parametrize("schedule", [
    lambda opt: schedulers.CosineAnnealingLR(opt, 40), lambda o, n: schedulers.CosineAnnealingLR(o, T_max=n), lambda o, n, power=1.0: schedulers.CosineAnnealingLR(o, n),
    lambda optimizer, total_steps=7: schedulers.CosineAnnealingLR(optimizer, total_steps),
])  # fmt: skip
def test_a_scheduler_is_told_by_what_its_factory_takes(schedule: Any) -> None:
    """Half way down its cosine after 20 of 40 steps; a factor of progress would be a scheduler."""
    lrs = wb.schedules.lr_values(wb.TrainConfig(peak_lr=0.5, total_steps=40, batch_size=1, schedule=schedule))
    assert lrs[[0, 20]] == pytest.approx([0.5, 0.25])
    progress = wb.schedules.lr_values(
        wb.TrainConfig(peak_lr=0.5, total_steps=40, batch_size=1, schedule=lambda x, end=0.2: 1 - x + end * x)
    )
    assert progress[20] == pytest.approx(0.3)


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_scheduler_of_torch_is_stepped_once_an_update(tmp_path: Path, case: str) -> None:
    schedule, optimizer = SCHEDULES[case]
    workload = small_workload(config={"schedule": schedule, "optimizer": optimizer})
    seen: list[float] = []

    def own(model: nn.Module) -> torch.optim.Optimizer:
        if optimizer == "momentum":
            made = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        else:
            made = decayed(model, 0.05) if "groups" in case else optimizer(model.parameters(), 0.05)  # type: ignore[operator]
        made.register_step_pre_hook(lambda made, *_: seen.append(made.param_groups[0]["lr"]))
        return made

    losses, _ = own_loop(workload, own, scheduler_of=schedule)
    record = wb.Trainer().run(workload, out=tmp_path / "s")
    assert record.steps["lr"].tolist() == pytest.approx(seen, rel=1e-6)
    np.testing.assert_allclose(record.steps["loss"], losses, rtol=1e-6)
    assert len(set(seen)) > 3


def test_a_scheduler_goes_on_where_a_run_was_stopped_and_follows_a_warmup(tmp_path: Path) -> None:
    schedule, optimizer = SCHEDULES["one cycle, momentum and groups"]
    config = {"schedule": schedule, "optimizer": optimizer, "total_steps": 45, "warmup_steps": 5}
    workload = small_workload(config=config)
    whole = wb.Trainer().run(workload, out=tmp_path / "whole").steps
    with pytest.raises(RuntimeError, match="planted"):
        wb.Trainer(hooks=[At(21, RuntimeError("planted"))]).run(workload, out=tmp_path / "s")
    again = wb.Trainer().run(workload, out=tmp_path / "s").steps
    assert again["loss"].tolist() == whole["loss"].tolist()
    assert whole["lr"].tolist()[:5] == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])
    assert whole["lr"].tolist()[5] == pytest.approx(0.05 / 25)


SGD = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": schedulers.CosineAnnealingLR}, r"CosineAnnealingLR is a class.*schedule=lambda optimizer: .*CosineAnn"),
        ({"schedule": schedulers.StepLR(SGD, 3)}, r"StepLR\(\.\.\.\) was made already.*schedule=lambda optimizer: "),
        ({"optimizer": SGD}, r"SGD\(\.\.\.\) was made already.*optimizer=lambda params, lr: torch.optim.SGD"),
        ({"schedule": lambda o: schedulers.StepLR(o, 3)}, "has a parameter called optimizer"),
        ({"schedule": lambda a, b, c: a}, "missing 2 required positional arguments.*A function of progress"),
        ({"schedule": lambda optimizer: 1.0}, "returned float; a function of an optimizer returns a scheduler"),
        ({"schedule": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=3)}, "depends on losses.*wb.watch"),
        ({"schedule": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, 40)}, r"whatever peak_lr is.*max_lr=optimizer"),
        ({"schedule": one_cycle}, r"moves the momentum.*cycle_momentum=False"),
        ({"schedule": one_cycle, "total_steps": 50, "optimizer": torch.optim.AdamW}, r"at step 41 of 50.*total_steps: \.\.\."),
    ],
)  # fmt: skip
def test_what_is_no_factory_says_how_to_write_one(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(wb.errors.ConfigError, match=said):
        wb.Trainer().run(small_workload(config=changes), out=tmp_path / "s")


class LightningModule(nn.Module):
    """What Lightning's own looks like from outside; that is not needed here."""

    __module__ = "lightning.pytorch.core.module"

    def training_step(self, batch: Any, index: int) -> Any: ...
    def on_train_batch_start(self, batch: Any, index: int) -> None: ...
    def configure_optimizers(self) -> Any: ...


class Annealed(LightningModule):
    __module__ = __name__

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return mean_loss(self(batch[0]), batch)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.seen += 1


def test_hooks_that_nobody_calls_are_told_once_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that the base class has and this one does not define are nobody's loss."""
    step_as_it_is = {
        "forward": lambda model, batch: model.training_step(batch, 0),
        "loss": lambda outputs, batch: outputs,
    }
    workload = small_workload(build_model=Annealed, metrics={}, **step_as_it_is)
    record = wb.lr_sweep.Study(lrs=(0.01, 0.02)).run(workload, out=tmp_path / "s")
    assert set(record.trials["state"]) == {"complete"}
    said = [r.getMessage() for r in caplog.records if "LightningModule" in r.getMessage()]
    assert len(said) == 1
    assert "Annealed" in said[0]
    assert "training_step, on_train_batch_start are not called" in said[0]
    assert "configure_optimizers" not in said[0]
    caplog.clear()
    wb.Trainer().run(small_workload(), out=tmp_path / "plain")
    assert not caplog.records


def steep(outputs: Any, batch: Any) -> torch.Tensor:
    """Its gradients are so large that the first scale of 65,536 overflows float16 a few times."""
    return 40 * squared(outputs.float(), batch)


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.Adam])
def test_float16_is_that_of_a_grad_scaler(tmp_path: Path, optimizer: Any) -> None:
    settings = {
        "precision": "float16",
        "optimizer": optimizer,
        "peak_lr": 0.01,
        "max_grad_norm": 5.0,
        "schedule": "linear",
    }
    workload = small_workload(loss=steep, config=settings)
    x, y = workload.train_data.tensors
    workload = workload.replace(train_data=torch.utils.data.TensorDataset(x.float(), y.float()), metrics={})
    model = build_model(workload, workload.config, CPU)
    own, scaler = torch.optim.Adam(model.parameters(), 0.01), torch.amp.GradScaler("cpu")
    batches, losses, scales = train_batches(workload, workload.config, CPU), [], []
    for step in range(40):
        ((batch, _),) = next(batches)
        own.param_groups[0]["lr"] = 0.01 * (1 - step / 40)
        own.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = steep(model(batch[0]), batch).mean()
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        scaler.unscale_(own)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(own)
        scaler.update()
        losses.append(loss.item())

    record = wb.Trainer().run(workload, out=tmp_path / "s")
    assert record.steps["loss_scale"].tolist() == scales
    skipped = record.steps["skipped"].to_numpy() == 1
    assert 0 < skipped.sum() < 20
    np.testing.assert_allclose(record.steps["loss"], losses, rtol=2e-3)
    with pytest.raises(RuntimeError, match="planted"):
        wb.Trainer(hooks=[At(21, RuntimeError("planted"))]).run(workload, out=tmp_path / "killed")
    again = wb.Trainer().run(workload, out=tmp_path / "killed")
    assert again.steps["loss"].tolist() == record.steps["loss"].tolist()
    lanes = wb.lr_sweep.Study(lrs=(0.01, 0.02)).run(workload, out=tmp_path / "lanes")
    (number,) = lanes.trials.loc[lanes.trials["peak_lr"] == 0.01, "trial"]
    assert lanes.trial(int(number)).steps["loss"].tolist() == record.steps["loss"].tolist()
    found = {f.code: f for f in wb.diagnose(workload, out=tmp_path / "d", **QUICK)}
    assert found["clipping.nonfinite"].status == "ok"
    assert "loop.no_gradient" not in {code for code, f in found.items() if f.status == "fail"}
