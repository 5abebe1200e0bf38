"""Code that is legal and unusual, or that raises where weights went astray: a diagnosis goes to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.workloads import small_net, small_workload, squared
from tests.playbook.test_playbook import QUICK
from workbench.record.read import read_events
from workbench.train.batches import train_batches

pytestmark = pytest.mark.usefixtures("no_figures")
X = torch.rand(160, 8, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 4).float()


def odd(
    build_model: Callable[[], nn.Module], loss: Any, *, config: dict[str, Any] | None = None, **fields: Any
) -> wb.Workload:
    settings: dict[str, Any] = {"peak_lr": 0.05, "total_steps": 24, "batch_size": 16}
    data = {"train_data": TensorDataset(X[:128], Y[:128]), "validation_data": TensorDataset(X[128:], Y[128:])}
    return wb.Workload(
        name="odd", build_model=build_model, loss=loss, config=wb.TrainConfig(**(settings | (config or {}))), **(data | fields)
    )  # fmt: skip


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.out(self.wide(x).exp()))


def reconstruction(outputs: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy(outputs, batch[0], reduction="none").mean(1)


def covered(outputs: Tensor, batch: Any) -> Tensor:
    spread = torch.linalg.cholesky(torch.eye(2) * (1.0 + outputs.square().mean()))
    return squared(outputs, batch) * spread[0, 0]


def surprise(outputs: Tensor, batch: Any) -> Tensor:
    shares = outputs.squeeze(-1).exp()
    return -Normal(shares / shares.sum(), 1.0, validate_args=True).log_prob(batch[1])


def bounded(outputs: Tensor, batch: Any) -> Tensor:
    if float(outputs.detach().abs().max()) > 1e3:
        raise ValueError("the scale is too large")
    return squared(outputs, batch)


@pytest.mark.parametrize(
    ("workload", "raised"),
    [
        (lambda: odd(Encoder, reconstruction), ()),
        (lambda: odd(lambda: nn.Linear(8, 1), covered), ("LinAlgError: linalg.cholesky",)),
        (lambda: odd(lambda: nn.Linear(8, 1), surprise), ("ValueError: Expected parameter loc",)),
        (lambda: small_workload(loss=bounded), ("ValueError: the scale is too large",)),
    ],
    ids=["a loss that asserts on NaN", "cholesky", "a distribution", "one that asserts on finite outputs"],
)
def test_what_raises_at_too_high_an_lr_has_diverged(tmp_path: Path, workload: Any, raised: tuple[str, ...]) -> None:
    record = wb.lr_sweep.Study(lrs=(0.01, 1e9)).run(workload(), out=tmp_path / "s")
    states = dict(zip(record.trials["peak_lr"], record.trials["state"], strict=True))
    assert states == {0.01: "complete", 1e9: "diverged"}
    number = int(record.trials.loc[record.trials["peak_lr"] == 1e9, "trial"].iloc[0])
    told = [e["error"] for e in read_events(record.trial(number).folder) if e["event"] == "raised"]
    assert [any(said in error for error in told) for said in raised] == [True] * len(raised)


def test_the_persons_own_training_says_what_it_raises(tmp_path: Path) -> None:
    workload = small_workload(loss=bounded, config={"peak_lr": 1e9})
    said = r"ValueError: the scale is too large \(test_odd_workloads\.py, line \d+: raise"
    with pytest.raises(wb.errors.WorkloadError, match=said):
        wb.diagnose(workload, out=tmp_path / "s", **QUICK)


def test_a_mistake_in_the_code_is_no_divergence(tmp_path: Path) -> None:
    """A bad example raises for every weight."""

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        if bool((batch[1] > 1).any()):
            raise ValueError("planted")
        return squared(outputs, batch)

    workload = small_workload(loss=loss)
    batches = workload.train_data.tensors
    batches[1][-1] = 2.0
    with pytest.raises(wb.errors.WorkloadError, match="ValueError: planted"):
        wb.lr_sweep.Study(lrs=(0.01, 0.02)).run(workload, out=tmp_path / "s")


def test_a_look_that_raises_is_not_measured_with_the_reason(tmp_path: Path) -> None:
    forward = lambda model, batch: model(batch[0].reshape(16, 8))  # noqa: E731 - takes batches of 16 and no others
    workload = odd(lambda: nn.Linear(8, 1), squared, config={"eval_batch_size": 16}, forward=forward)
    diagnosis = wb.diagnose(workload, out=tmp_path / "s", **QUICK)
    for code in ("batch_size.noise_scale", "evaluation.weighting", "evaluation.coverage"):
        assert diagnosis[code].status == "not_measured"
        assert "invalid for input of size" in diagnosis[code].summary, code
    assert diagnosis["lr.best"].value is not None


class Potential(nn.Module):
    """The gradient of a learnt potential: forward differentiates, in evaluation as in training."""

    def __init__(self) -> None:
        super().__init__()
        self.potential = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.potential(x).sum(), x, create_graph=True)
        return force


def test_gradients_are_on_in_evaluation_only_where_forward_differentiates() -> None:
    """Those of an ordinary model stay off; a force is the same with them as in training."""
    seen: list[bool] = []
    plain = small_workload(forward=lambda model, batch: (seen.append(torch.is_grad_enabled()), model(batch[0]))[1])
    wb.evaluation.evaluate(plain, small_net().double(), batch_size=13, precision="float64")
    assert seen == [False]
    model = Potential()
    found = {e.metric: e.value for e in wb.evaluation.evaluate(ODD["a force"](), model, batch_size=7)}
    assert found["loss"] == pytest.approx(float((model(X[128:]).detach() - X[128:]).square().mean()), rel=1e-5)


RAGGED = [torch.randint(1, 12, (3 + i // 8,)) for i in range(128)]


def padded(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens = nn.utils.rnn.pad_sequence(items, batch_first=True)
    return tokens[:, :-1], tokens[:, 1:]


def token_loss(outputs: Tensor, batch: Any) -> Tensor:
    losses = F.cross_entropy(outputs.transpose(1, 2), batch[1], reduction="none", ignore_index=0)
    return losses.sum(1) / (batch[1] > 0).sum(1)


class Views(nn.Module):
    """Two views of each example on the unit sphere."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.embed, self.noise = nn.Linear(8, 8, bias=False), noise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (F.normalize(self.embed(x + self.noise * torch.randn_like(x)), dim=1) for _ in range(2))
        return first, second


def in_batch_negatives(outputs: Any, batch: Any) -> Tensor:
    first, second = outputs
    return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(batch[0])), reduction="none")


ODD: dict[str, Callable[[], wb.Workload]] = {
    "a force": lambda: odd(Potential, lambda o, b: (o - b[0]).square().mean(1), config={"peak_lr": 0.2, "total_steps": 150}),
    "ragged": lambda: odd(
        lambda: nn.Sequential(nn.Embedding(12, 8, padding_idx=0), nn.Linear(8, 12)), token_loss,
        train_data=RAGGED, validation_data=RAGGED[:40], collate=padded, config={"eval_batch_size": 16},
    ),
    "complex inputs": lambda: odd(
        lambda: nn.Linear(16, 1), squared, forward=lambda model, batch: model(torch.view_as_real(batch[0]).flatten(1)),
        train_data=TensorDataset(torch.complex(X, 1 - X)[:128], Y[:128]),
        validation_data=TensorDataset(torch.complex(X, 1 - X)[128:], Y[128:]),
    ),
    "outputs of a type of their own": lambda: odd(
        lambda: nn.Linear(8, 1), lambda o, b: squared(o.value, b), forward=lambda m, b: SimpleNamespace(value=m(b[0]))
    ),
    "a distribution": lambda: odd(
        lambda: nn.Linear(8, 2), lambda o, b: -o.log_prob(b[1]),
        forward=lambda m, b: Normal(*(m(b[0]) * torch.tensor([1.0, 0.1])).exp().unbind(1)),
    ),
    "bfloat16 parameters": lambda: odd(
        lambda: nn.Linear(8, 1).bfloat16(), lambda o, b: (o.squeeze(-1) - b[1].bfloat16()) ** 2,
        forward=lambda model, batch: model(batch[0].bfloat16()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_a_legal_workload_is_diagnosed_to_the_end(tmp_path: Path, case: str) -> None:
    diagnosis = wb.diagnose(ODD[case](), out=tmp_path / "s", **QUICK)
    found = {f.code: f for f in diagnosis}
    assert found["lr.best"].value is not None
    looked = ("evaluation.weighting", "evaluation.coverage", "evaluation.too_small")
    assert [f"{code}: {found[code].summary}" for code in looked if found[code].status != "ok"] == []
    assert [
        code for code, f in found.items() if f.status == "fail" and code.startswith(("loop.", "loss.", "init."))
    ] == []
    evals = wb.open(tmp_path / "s").evals
    assert np.isfinite(evals.loc[evals["trial"] == 0, "value"]).all(), "the person's own training"


@pytest.mark.parametrize("views", [Views, lambda: Views(1e-4)], ids=["views", "random views"])
def test_a_loss_that_couples_examples_is_evaluated_in_batches_of_training(tmp_path: Path, views: Any) -> None:
    """Where all examples are alike, telling one out of n costs log(n): log(16) in training, log(128) in one evaluation of all."""
    alike = TensorDataset(torch.ones(128, 8), torch.zeros(128))
    workload = odd(views, in_batch_negatives, train_data=alike, validation_data=alike, config={"eval_every_steps": 24})
    record = wb.Trainer().run(workload, out=tmp_path / "s")
    first = record.evals[record.evals["step"] == 0]["value"].to_list()
    assert first == pytest.approx([np.log(16)], abs=1e-3)
    assert record.steps["loss"].iloc[0] == pytest.approx(np.log(16), abs=1e-3)


def surrogate(outputs: Tensor, batch: Any) -> Tensor:
    """Its gradient is that of the squared error; its value is the negative of it, and rises as the model gets better."""
    error = squared(outputs, batch)
    return error - 2 * error.detach()


def test_a_loss_that_is_not_to_be_minimised_judges_nothing(tmp_path: Path) -> None:
    settings = {"peak_lr": 0.004, "select": "validation/error", "total_steps": 60}
    workload = small_workload(loss=surrogate, metrics={"error": squared}, config=settings, minimised=False)
    diagnosis = wb.diagnose(workload, out=tmp_path / "s")
    by_loss = [f for f in diagnosis if f.code.startswith(("lr.", "stability.")) and not f.code.endswith("_logits")]
    assert {f.status for f in by_loss} == {"ok"}
    assert all("minimised=False" in f.summary for f in by_loss)
    found = diagnosis.recommendation
    assert found is not None
    assert found["candidate"] in ("lr 0.008", "lr 0.016"), "twice or four times the own one"
    assert found["recommended"]["validation/error"] < found["baseline"]["validation/error"]
    assert diagnosis["checkpoints.selection"].status != "fail"


def test_a_batch_in_which_no_example_counts_teaches_nothing(tmp_path: Path) -> None:
    """Only the eight examples of the first batch count; later batches of other epochs hold some of them, or none."""
    counts = torch.zeros(48)
    workload = small_workload(config={"batch_size": 8, "total_steps": 30})
    ((batch, _),) = next(train_batches(workload, workload.config, torch.device("cpu")))
    counts[torch.isin(workload.train_data.tensors[1].double(), batch[1])] = 1.0
    x, y = workload.train_data.tensors
    data = TensorDataset(x, y, counts)
    held = TensorDataset(x, y, torch.ones(48))
    weighed = workload.replace(train_data=data, validation_data=held, weights=lambda batch: batch[2])
    record = wb.Trainer().run(weighed, out=tmp_path / "s")
    assert record.state == "complete"
    empty = record.steps["grad_norm"] == 0
    assert 0 < int(empty.sum()) < 30
    assert np.isfinite(record.steps["loss"]).all()
