"""Losses that say nothing of progress, beside losses of the same parts that do: `wb.watch` judges the curves of the second ones alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader

import workbench as wb

Loss = Callable[[nn.Module, int], Tensor]
"""Of a model from 6 numbers to 5 and an update."""
ROWS = torch.arange(32)
UPDATES = 160
"""Of losses whose number of classes varies: few are looked at after the first."""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def inputs(rows: int = 32) -> Tensor:
    return torch.randn(rows, 6)


def with_baseline(model: nn.Module, k: int) -> Tensor:
    out = model(inputs())
    chosen = Categorical(logits=out[:, :4])
    action = chosen.sample()
    advantage = action.float() - out[:, 4]
    return (
        -(chosen.log_prob(action) * advantage.detach()).mean()
        + 0.5 * advantage.pow(2).mean()
        - 0.01 * chosen.entropy().mean()
    )


def step_by_step(model: nn.Module, k: int) -> Tensor:
    logs = [model(inputs(1))[0].log_softmax(0)[k % 5] for _ in range(8)]
    return torch.stack([-log * weight for log, weight in zip(logs, torch.randn(8), strict=True)]).sum()


def one_step(model: nn.Module, k: int) -> Tensor:
    out = model(inputs(1))[0]
    error = torch.randn(()) - out[0]
    return -out[1:].log_softmax(0)[k % 4] * error.detach() + error**2


def clipped_ratio(model: nn.Module, k: int) -> Tensor:
    mean, scale = model(inputs())[:, :2].unbind(1)
    log = Normal(mean, scale.exp()).log_prob(torch.randn(32))
    ratio, advantage = (log - log.detach()).exp(), torch.randn(32)
    return torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()


def by_cross_entropy(model: nn.Module, k: int) -> Tensor:
    return torch.dot(F.cross_entropy(model(inputs()), ROWS % 5, reduction="none"), torch.randn(32))


def without_baseline(model: nn.Module, k: int) -> Tensor:
    probabilities = model(inputs()).softmax(1)
    chosen = torch.multinomial(probabilities.detach(), 1)
    return -(probabilities.gather(1, chosen).log()[:, 0] * torch.arange(1.0, 33.0)).mean()


def growing(model: nn.Module, k: int) -> Tensor:
    rows = 8 if k < UPDATES // 5 else 32
    return F.cross_entropy(model(inputs(rows)) @ torch.randn(rows, 5).T, ROWS[:rows])


class Followed:
    """Targets from a copy of the model, which is set to the model every few updates, or stays as it is."""

    def __init__(self, *, follows: bool) -> None:
        self.copy, self.follows = network(), follows

    def __call__(self, model: nn.Module, k: int) -> Tensor:
        if self.follows and k % 10 == 0:
            self.copy.load_state_dict(model.state_dict())
        x = inputs()
        with torch.no_grad():
            target = 1 + 0.9 * self.copy(x).amax(1)
        return F.smooth_l1_loss(model(x)[:, 0], target)


class Averaged:
    """A supervised loss, beside a moving average of the model that is evaluated after every update, or teaches besides."""

    def __init__(self, how: str) -> None:
        self.copy, self.how, self.held = network(), how, torch.randn(32, 6)
        self.loader = DataLoader(torch.randn(64, 6), 32)  # type: ignore[arg-type]

    def __call__(self, model: nn.Module, k: int) -> Tensor:
        with torch.no_grad():
            for own, new in zip(self.copy.parameters(), model.parameters(), strict=True):
                own.lerp_(new, 0.1)
            given = self.held if self.how == "held" else inputs()
            out = self.copy(given)
            if self.how == "measured":
                F.mse_loss(out, given[:, :5])
        x = next(iter(self.loader)) if self.how == "drawn" else inputs()
        out = model(x)
        if self.how in ("held", "drawn", "measured"):
            return F.mse_loss(out, x[:, :5])
        with torch.no_grad():
            taught = self.copy(x)
        return F.cross_entropy(out, ROWS % 5) + (F.mse_loss(out, taught) if self.how == "teacher" else 0.0)


def weighted(model: nn.Module, k: int) -> Tensor:
    logs = model(inputs()).log_softmax(1)
    return -(logs[ROWS, ROWS % 5] * torch.rand(32)).mean() - 0.01 * (logs.exp() * -logs).sum(1).mean()


def masked(model: nn.Module, k: int) -> Tensor:
    wanted = F.one_hot(ROWS % 5, 5).float()
    return -(model(inputs()).log_softmax(1) * wanted).sum(1).mean() * -1.0 * -1.0


def hinge(model: nn.Module, k: int) -> Tensor:
    signs = torch.where(ROWS % 2 == 0, 1.0, -1.0)
    return (1 - signs * model(inputs())[:, 0]).clamp(min=0).mean() + F.softplus(-signs * model(inputs())[:, 1]).mean()


def cosine(model: nn.Module, k: int) -> Tensor:
    return -(F.normalize(model(inputs()), dim=1) * torch.randn(32, 5)).sum(1).mean()


def flow(model: nn.Module, k: int) -> Tensor:
    scale, shift = model(inputs())[:, :2].unbind(1)
    return 0.5 * (torch.randn(32) * scale.exp() + shift).pow(2).mean() - scale.mean()


def sampled_negatives(model: nn.Module, k: int) -> Tensor:
    out, negatives = model(inputs()), torch.multinomial(torch.ones(32, 5), 2)
    return -(F.logsigmoid(out[:, 0]).mean() + F.logsigmoid(-out.gather(1, negatives)).mean() * 0.5)


def varied(model: nn.Module, k: int) -> Tensor:
    rows = int(torch.randint(8, 64, ()))  # padded candidates, or places of a text
    return F.cross_entropy(model(inputs(rows)) @ torch.randn(rows, 5).T, ROWS.repeat(2)[:rows])


def negatives(model: nn.Module, k: int) -> Tensor:
    rows = 8 + round(248 * k / UPDATES)
    return F.cross_entropy(model(inputs()) @ torch.randn(5, rows), ROWS % 8)


class Queued:
    """The positive is the first candidate, and the others are earlier keys of a copy that follows the model, or noise as at the start."""

    def __init__(self, *, fills: bool) -> None:
        self.copy, self.queue, self.fills = network(), F.normalize(torch.randn(256, 5), dim=1), fills

    def __call__(self, model: nn.Module, k: int) -> Tensor:
        x = inputs()
        with torch.no_grad():
            for own, new in zip(self.copy.parameters(), model.parameters(), strict=True):
                own.lerp_(new, 0.9)
            keys = F.normalize(self.copy(x), dim=1)
        query = F.normalize(model(x), dim=1)
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.T], 1) / 0.2
        if self.fills:
            self.queue = torch.cat([keys, self.queue])[:256]
        return F.cross_entropy(logits, torch.zeros(32, dtype=torch.long))


def by_a_norm(model: nn.Module, k: int) -> Tensor:
    p = model(inputs())
    return -(p * torch.rsqrt(p.pow(2).mean(1, keepdim=True) + 1e-6) * torch.randn(32, 5)).mean()


def by_a_root(model: nn.Module, k: int) -> Tensor:
    p = model(inputs())
    return -(p / (p.pow(2).sum(1, keepdim=True) + 1e-6).sqrt() * torch.randn(32, 5)).mean()


def of_fixed_width(model: nn.Module, k: int) -> Tensor:
    log = -((torch.randn(32) - model(inputs())[:, 0]) ** 2) / (2 * 0.5**2)
    return -(log * torch.randn(32)).mean()


def uneven(model: nn.Module, k: int) -> Tensor:
    rows = 8 if k % 4 == 3 else 32  # the last batch of an epoch
    return F.cross_entropy(model(inputs(rows)) @ torch.randn(rows, 5).T, ROWS[:rows])


NO_MEASURE = (
    (with_baseline, "both signs"), (step_by_step, "both signs"), (one_step, "both signs"), (clipped_ratio, "both signs"), (by_cross_entropy, "both signs"),
    (without_baseline, "choices that the model makes"), (growing, "from 8 to 32"), (negatives, "grow in number"), (of_fixed_width, "both signs"), (Followed(follows=True), "a copy of the model (Sequential)"),
    (Queued(fills=True), "first of 257 candidates"),
)  # fmt: skip
MEASURES = (
    weighted,
    masked,
    hinge,
    cosine,
    flow,
    sampled_negatives,
    uneven,
    varied,
    by_a_norm,
    by_a_root,
    Followed(follows=False),
    Queued(fills=False),
    *map(Averaged, ("held", "drawn", "measured", "classes", "teacher")),
)


def judged(loss: Loss, out: Path, seed: int = 0, code: str = "stability.divergent") -> wb.Finding:
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    models = [model, loss.copy] if isinstance(loss, (Followed, Averaged)) else model
    with wb.watch(models, optimizer, out=out) as run:
        for k in range(UPDATES if loss in (growing, negatives, varied) else 40):
            optimizer.zero_grad()
            loss(model, k).backward()
            optimizer.step()
    return run.diagnose()[code]


@pytest.mark.parametrize(("loss", "why"), NO_MEASURE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_loss_that_need_not_fall_is_not_judged_by_and_says_why(loss: Loss, why: str, tmp_path: Path) -> None:
    found = judged(loss, tmp_path / "run")
    assert (found.status, why in found.summary) == ("not_measured", True), found.summary


@pytest.mark.parametrize("follows", [True, False])
def test_targets_that_a_copy_of_the_model_makes_are_no_labels(follows: bool, tmp_path: Path) -> None:
    found = judged(Followed(follows=follows), tmp_path / "run", code="data.labels")
    assert (found.status, "come from a copy" in found.summary) == (("not_measured", True) if follows else ("ok", False))


@pytest.mark.parametrize("loss", MEASURES, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_of_the_same_parts_that_measures_progress_is(loss: Loss, seed: int, tmp_path: Path) -> None:
    assert judged(loss, tmp_path / "run", seed).status == "ok"


class Coupling(nn.Module):
    """A density of four numbers, two of which are scaled and moved by what a network makes of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.net(x[:, :2]).chunk(2, 1)
        return torch.cat([x[:, :2], x[:, 2:] * scale.exp() + shift], 1), scale.sum(1)


@pytest.mark.parametrize(("sign", "schedule", "beside", "status"), [
    (1.0, "constant", False, "ok"), (1.0, "cosine", False, "ok"), (-1.0, "constant", False, "fail"), (-1.0, "cosine", False, "fail"), (-1.0, "constant", True, "ok"),
])  # fmt: skip
def test_a_likelihood_that_falls_below_zero_at_the_same_pace_has_no_minimum(
    sign: float, schedule: str, beside: bool, status: str, tmp_path: Path
) -> None:
    """The right one falls below zero, too, on data that lie close to a line, and nears its minimum. What another optimizer trains beside it, as a critic, may reward without end."""
    torch.manual_seed(0)
    model = Coupling()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    other = nn.Linear(4, 1)
    critic = torch.optim.SGD(other.parameters(), lr=1e-2)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(500):
            x = torch.randn(64, 2)
            x = torch.cat([x, x + 1e-3 * torch.randn(64, 2)], 1)
            z, logarithm = model(x)
            loss = (0.5 * z.square().sum(1) - sign * logarithm).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if schedule == "cosine":
                cosine.step()
            if beside:
                critic.zero_grad()
                other(x).square().mean().backward()
                critic.step()
    found = run.diagnose()
    assert float(run.record.steps["loss"].iloc[-1]) < -2
    assert (found["loss.unbounded"].status if "loss.unbounded" in found else "ok") == status
