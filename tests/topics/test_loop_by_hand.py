"""What a loop does without asking torch for a loss function or a layer of its own, found beside a healthy twin: `wb.watch` is silent on that."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import workbench as wb
from workbench.findings.diagnosis import Diagnosis

Loss = Callable[[Tensor, Tensor], Tensor]


def watched(
    out: Path, loss: Loss, model: nn.Module, x: Tensor, y: Tensor, updates: int = 12, clip: float | None = None
) -> Diagnosis:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=out) as run:
        for k in range(updates):
            pick = torch.arange(16) + k
            optimizer.zero_grad()
            loss(model(x[pick]), y[pick]).backward()
            if clip is not None:
                nn.utils.clip_grad_value_(model.parameters(), clip)
            optimizer.step()
    return run.diagnose()


def huber(p: Tensor, y: Tensor) -> Tensor:
    d = torch.sub(p, y).abs()
    return torch.where(d < 1, 0.5 * d * d, d - 0.5).sum()


def entropy(p: Tensor, y: Tensor) -> Tensor:
    p = p.sigmoid()
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()


def pinball(p: Tensor, y: Tensor) -> Tensor:
    q, e = torch.tensor([0.1, 0.5, 0.9]).view(-1, 1), y - p.unsqueeze(2)
    return torch.maximum(q * e, (q - 1) * e).mean()


LEVELS = (torch.arange(16) + 0.5) / 16


def heteroscedastic(p: Tensor, y: Tensor) -> Tensor:
    return (0.5 * p[:, 1:] + (y - p[:, :1]) ** 2 / (2 * p[:, 1:].exp())).mean()


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "mended"),
    [
        (lambda p, y: ((p - y) ** 2).mean(), (1,), (), lambda y: y[:, None]), (lambda p, y: (y - p).abs().mean(), (), (1,), lambda y: y[:, 0]),
        (huber, (1,), (), lambda y: y[:, None]), (entropy, (1,), (), lambda y: y[:, None]), (pinball, (3,), (), lambda y: y[:, None, None]),
        (lambda p, y: p.sub(y).square().mean(), (1, 4, 5), (4, 5), lambda y: y[:, None]),
        (heteroscedastic, (2,), (), lambda y: y[:, None]), (lambda p, y: torch.log(torch.cosh(y - p)).sum(1).mean(), (1,), (), lambda y: y[:, None]),
    ],
    ids=["squared", "absolute", "huber", "entropy", "quantiles", "maps", "with a variance", "log cosh"],
)  # fmt: skip
def test_a_loss_by_hand_that_pairs_each_output_with_every_target_is_found_and_its_twin_is_not(
    loss: Loss, outputs: tuple[int, ...], targets: tuple[int, ...], mended: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    last = nn.Unflatten(1, outputs) if outputs else nn.Flatten(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, math.prod(outputs)), last)
    x, y = torch.randn(40, 4), torch.rand(40, *targets)
    found = watched(tmp_path / "faulty", loss, model, x, y)["loss.broadcast"]
    assert (found.status, Path(__file__).name in found.summary) == ("fail", True)
    assert watched(tmp_path / "healthy", loss, model, x, mended(y))["loss.broadcast"].status != "fail"


class _Scaled(nn.Module):
    """Spreads one number over as many features as a batch has examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 1), nn.Linear(16, 1)
        self.register_buffer("scales", torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) * self.scales).sin())  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, y: F.softplus(p - p.squeeze(1)).mean(),  # outputs with each other: a ranking
        lambda p, y: (p - y[None, :]).square().mean(),  # asked for by an axis
        lambda p, y: (p.squeeze(1) - y).square().mean(),
        lambda p, y: (p.squeeze(1)[:, None] - y).abs().mean() - 0.5 * (p - p.squeeze(1)).abs().mean(),  # energy distance
        lambda p, y: torch.exp(-((p.flatten().unsqueeze(1) - y) ** 2)).mean(),  # kernel
        lambda p, y: (y[:, None] - p.squeeze(1)).abs().min(1).values.mean(),  # nearest
        lambda p, y: -torch.logsumexp(-((y[:, None] - p.squeeze(1)) ** 2), 1).mean(),  # mixture
        lambda p, y: ((p - y) ** 2 * (1 - torch.eye(16))).mean(),  # of others
        lambda p, y: torch.maximum(LEVELS * (y[:, None] - p), (LEVELS - 1) * (y[:, None] - p)).mean(),  # as many quantiles as examples
        lambda p, y: (torch.softmax(-((p - torch.linspace(-1, 1, 16)) ** 2), 1).mean(0) - 1 / 16).square().sum(),  # histogram
        lambda p, y: F.cross_entropy(p @ y[None] / (p.norm(dim=1, keepdim=True) * y[:, None].norm(dim=1)), torch.arange(16)),  # similarities
        lambda p, y: (torch.exp(-((p - torch.linspace(0, 1, 16)) ** 2)).mean(0) - y).square().mean(),  # density on a grid
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(5))
def test_pairs_that_are_meant_rouse_nothing(loss: Loss, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    found = watched(tmp_path / "run", loss, _Scaled(), torch.randn(40, 4), torch.rand(40))["loss.broadcast"]
    assert found.status != "fail"


class _Dropped(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.layer, self.p = nn.Linear(4, 1), p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(self.layer(x), self.p, self.training), 0.99, training=False)


@pytest.mark.parametrize(("p", "status"), [(0.0, "ok"), (0.8, "ok"), (0.9, "fail"), (1.0, "fail")])
def test_dropout_is_judged_where_it_drops(p: float, status: str, tmp_path: Path) -> None:
    found = watched(tmp_path / "run", F.mse_loss, _Dropped(p), torch.randn(40, 4), torch.rand(40, 1))["units.dropped"]
    assert (found.status, "F.dropout" not in found.summary) == (status, True)


@pytest.mark.parametrize(("clip", "status", "scale"), [(1e-6, "warn", 1.0), (10.0, "ok", 1.0), (1e-6, "ok", 0.0)])
def test_clipping_value_by_value_is_judged_by_what_it_leaves(
    clip: float, status: str, scale: float, tmp_path: Path
) -> None:
    x, y = torch.randn(40, 4), torch.rand(40, 1)
    found = watched(tmp_path / "run", lambda p, y: scale * F.mse_loss(p, y), nn.Linear(4, 1), x, y, clip=clip)
    assert found["clipping.aggressive"].status == status


def test_gradients_that_are_not_finite_are_no_clipped_ones(tmp_path: Path) -> None:
    loss: Loss = lambda p, y: p.sum() * float("nan")  # noqa: E731
    found = watched(tmp_path / "run", loss, nn.Linear(4, 1), torch.randn(40, 4), torch.rand(40, 1), clip=0.1)
    assert found["clipping.aggressive"].status != "warn"


def _some(*parts: slice, kind: str = "numbers") -> list[Tensor]:
    torch.manual_seed(3)
    rows = torch.randn(800, 6)
    if kind == "few":
        rows = torch.randint(0, 3, (800, 6)).float()
    if kind == "constant":
        rows = rows[:, :1].round().expand(800, 6).contiguous()
    return [rows[part] for part in parts]


ALL, TRAIN, VALID, BOTH = slice(0, 800), slice(0, 640), slice(640, 800), slice(560, 800)
SPLITS = [
    pytest.param("warn", [ALL, VALID], {}, id="trained on all"),
    pytest.param("warn", [TRAIN, BOTH], {"loader": True}, id="splits that overlap"),
    pytest.param("warn", [ALL, TRAIN, VALID], {}, id="trained on all, and training accuracy"),
    pytest.param("ok", [TRAIN, VALID], {}, id="apart"),
    pytest.param("ok", [TRAIN, TRAIN, VALID], {}, id="training accuracy"),
    pytest.param("ok", [TRAIN, slice(0, 100), VALID], {}, id="training accuracy of some"),
    pytest.param("ok", [TRAIN, TRAIN], {"loader": True}, id="no validation"),
    pytest.param("ok", [TRAIN, VALID], {"kind": "few"}, id="few values"),
    pytest.param("ok", [ALL, VALID], {"kind": "constant"}, id="constant"),
    pytest.param("ok", [ALL, VALID], {"mode": True}, id="in training mode, as a policy's own choices"),
]


@pytest.mark.parametrize(("status", "parts", "how"), SPLITS)
def test_examples_that_are_trained_on_and_evaluated_on_are_told_from_a_training_accuracy(
    status: str, parts: list[slice], how: dict[str, Any], tmp_path: Path
) -> None:
    train, *others = _some(*parts, kind=how.get("kind", "numbers"))
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(2):
            model.train()
            for pick in torch.randperm(len(train)).split(40):
                optimizer.zero_grad()
                model(train[pick]).square().mean().backward()
                optimizer.step()
            model.train(how.get("mode", False))
            for rows in others:
                with torch.no_grad():
                    for batch in DataLoader(rows, 40) if how.get("loader") else rows.split(40) if how else [rows]:
                        model(batch)
    assert run.diagnose()["data.leakage"].status == status


@pytest.mark.parametrize(
    ("weigh", "status"),
    [
        (lambda n: n, "warn"), (lambda n: n.sqrt() / 800, "warn"), (lambda n: n / n.sum(), "warn"), (lambda n: 1 / n, "ok"), (lambda n: n**-0.5, "ok"),
        (torch.ones_like, "ok"), (lambda n: torch.tensor([1.0, 0.0, 0.0]), "ok"), (lambda n: torch.tensor([0.2, 0.5, 0.6]), "ok"), (lambda n: torch.rand(3)[[0, 0, 0]], "ok"),
    ],
)  # fmt: skip
def test_weights_of_a_sampler_that_rise_with_the_counts_are_found(
    weigh: Callable[[Tensor], Tensor], status: str, tmp_path: Path
) -> None:
    targets = torch.tensor([0] * 500 + [1] * 200 + [2] * 100)
    weights = weigh(torch.bincount(targets).float())[targets]
    loader = DataLoader(
        TensorDataset(torch.randn(800, 4), targets), 16, sampler=WeightedRandomSampler(weights.tolist(), 160)
    )
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = run.diagnose()["data.imbalance"]
    assert (found.status, Path(__file__).name in found.summary) == (status, status == "warn")


class _Unnamed(Dataset[Tensor]):
    """Examples whose targets nobody can look up beforehand."""

    def __init__(self, targets: Tensor) -> None:
        self._rows = targets.float()[:, None]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, k: int) -> Tensor:
        return self._rows[k]


def _said_of_weights(counts: list[int], power: float, named: bool, out: Path) -> str:
    n = torch.tensor(counts)
    targets = torch.arange(len(n)).repeat_interleave(n)
    weights = (n.double() ** power)[targets]
    data: Dataset[Any] = TensorDataset(targets.float()[:, None], targets) if named else _Unnamed(targets)
    loader = DataLoader(data, 4, sampler=WeightedRandomSampler(weights.tolist(), 8))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=out) as run:
        for batch in loader:
            optimizer.zero_grad()
            model(batch[0] if named else batch).square().mean().backward()
            optimizer.step()
    return run.diagnose()["data.imbalance"].status


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("power", [-1.0, -0.5])
@pytest.mark.parametrize(
    "counts",
    [
        [100] + [50] * 4, [300] + [100] * 9, [400] + [200] * 4 + [100] * 16, [60, 20], [180, 20], [540, 20], [90, 90],
        *torch.randint(10, 200, (4, 6), generator=torch.Generator().manual_seed(0)).repeat(1, 3).tolist(),
    ],
    ids=str,
)  # fmt: skip
def test_weights_that_fall_with_the_counts_are_right_where_classes_are_of_a_size(
    counts: list[int], power: float, named: bool, tmp_path: Path
) -> None:
    assert _said_of_weights(counts, power, named, tmp_path / "run") == "ok"


@pytest.mark.parametrize(
    ("counts", "named"), [([100] + [50] * 4, True), ([400, 400, 100, 20], True), ([511, 203, 97], False)]
)
@pytest.mark.parametrize("power", [1.0, 0.5])
def test_weights_that_rise_with_the_counts_are_found_where_classes_are_of_a_size(
    counts: list[int], named: bool, power: float, tmp_path: Path
) -> None:
    assert _said_of_weights(counts, power, named, tmp_path / "run") == "warn"


def by_loader(x: Tensor, y: Tensor, model: nn.Module) -> Any:
    return ((F.cross_entropy(model(a), b)) for a, b in DataLoader(TensorDataset(x, y.long()), 25, shuffle=True))


def by_index(x: Tensor, y: Tensor, model: nn.Module) -> Any:
    return (F.mse_loss(model((x[k] - 1) / 2)[:, 0], y[k]) for k in torch.randperm(len(x)).split(20))


def by_hand(x: Tensor, y: Tensor, model: nn.Module) -> Any:
    loader = DataLoader(TensorDataset(x, y[:, None]), 25, shuffle=True)
    return ((model(a)[:, :1] - b).abs().mean() for a, b in loader)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("status", "batches", "kind", "column"),
    [
        ("warn", by_loader, "classes", lambda y: y), ("warn", by_loader, "classes", lambda y: (y == 1) * 2.0), ("warn", by_index, "values", lambda y: 3 - 2 * y), ("warn", by_hand, "values", lambda y: y),
        ("ok", by_loader, "classes", None), ("ok", by_index, "values", None), ("ok", by_hand, "values", None),
        ("ok", by_loader, "classes", lambda y: torch.where(torch.rand(200) < 0.97, y, 0.0)), ("ok", by_index, "values", lambda y: y + 0.05 * torch.randn(200)),
        ("ok", by_hand, "values", lambda y: torch.ones(200)), ("ok", by_loader, "classes", lambda y: (torch.arange(200) == 3) * 1.0),
    ],
)  # fmt: skip
def test_a_column_that_is_the_target_is_found_and_a_good_feature_is_none(
    status: str,
    batches: Callable[..., Any],
    kind: str,
    column: Callable[[Tensor], Tensor] | None,
    seed: int,
    tmp_path: Path,
) -> None:
    torch.manual_seed(seed)
    x, model = torch.randn(200, 5), nn.Linear(5, 3)
    y = x.sum(1) + 0.3 * torch.randn(200)
    y = y if kind == "values" else torch.bucketize(y, torch.tensor([-1.0, 1.0])).float()
    if column is not None:
        x[:, 2] = column(y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for loss in (loss for _ in range(6) for loss in batches(x, y, model)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = run.diagnose()["data.leakage"]
    assert (found.status, "column 2 of" in found.summary.lower()) == (status, status == "warn")


@pytest.mark.parametrize(("ahead", "status"), [(0, "warn"), (1, "ok")])
def test_a_target_within_its_own_window_is_found(ahead: int, status: str, tmp_path: Path) -> None:
    """A walk is the hardest to forecast: the next value is nearly the last."""
    torch.manual_seed(0)
    walk, model = torch.randn(425).cumsum(0) / 10, nn.Linear(24, 1)
    x, y = walk.unfold(0, 24, 1)[:400, :, None], walk[23 + ahead :][:400]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for a, b in DataLoader(TensorDataset(x, y), 20, shuffle=True):
            optimizer.zero_grad()
            F.mse_loss(model(a.squeeze(2))[:, 0], b).backward()
            optimizer.step()
    found = run.diagnose()["data.leakage"]
    assert (found.status, "column 23 of" in found.summary.lower()) == (status, status == "warn")


def hot(p: Tensor, y: Tensor) -> Tensor:
    return -(F.one_hot(y, 10) * p.log_softmax(1)).sum(1).mean()


CHOSEN: dict[str, Loss] = {
    "of torch, as it was before the watch": F.cross_entropy,
    "logarithms": lambda p, y: F.nll_loss(p.log_softmax(1), y),
    "index": lambda p, y: -(p.log_softmax(1)[range(len(y)), y]).mean(),
    "index of a softmax": lambda p, y: -torch.log(p.softmax(1)[torch.arange(len(y)), y] + 1e-9).mean(),
    "gather": lambda p, y: -p.log_softmax(1).gather(1, y[:, None]).squeeze(1).mean(),
    "one-hot": hot,
}
ERRORS: dict[str, Loss] = {
    "of torch, as it was before the watch": F.mse_loss,
    "a square": lambda p, y: ((p - y) ** 2).mean(),
    "a product": lambda p, y: (lambda d: (d * d).mean())(torch.sub(y, p)),
    "absolute": lambda p, y: (y - p).abs().mean(),
}


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize(
    ("loss", "targets"),
    [*((loss, "classes") for loss in CHOSEN.values()), *((loss, "values") for loss in ERRORS.values())],
    ids=[*CHOSEN, *(f"error {name}" for name in ERRORS)],
)
def test_a_loss_by_hand_tells_of_the_first_outputs_and_targets_what_that_of_torch_tells(
    loss: Loss, targets: str, wrong: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if wrong:
        for p in model.parameters():
            nn.init.normal_(p)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for x in torch.randn(12, 32, 64):
            optimizer.zero_grad()
            loss(model(x), x[:, :10].argmax(1) if targets == "classes" else x[:, :10]).backward()
            optimizer.step()
    found = run.diagnose()["init.loss"]
    assert (found.status, "Does not apply" in found.summary) == ("warn" if wrong else "ok", False)


@pytest.mark.parametrize("causal", [True, False])
def test_a_language_model_whose_loss_is_by_hand_is_asked_whether_it_sees_its_targets(
    causal: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.ModuleList([nn.Embedding(20, 16), layer, nn.Linear(16, 20)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    mask = nn.Transformer.generate_square_subsequent_mask(12) if causal else None
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(8):
            tokens = torch.randint(20, (4, 13))
            logs = model[2](layer(model[0](tokens[:, :-1]), src_mask=mask)).log_softmax(-1)
            optimizer.zero_grad()
            (-logs.gather(-1, tokens[:, 1:, None])).mean().backward()
            optimizer.step()
    assert run.diagnose()["loop.sees_target"].status == ("ok" if causal else "fail")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(k, marks=[pytest.mark.slow, pytest.mark.nightly]) for k in range(1, 5))]
)
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("kind", ["cross-entropy", "binary", "by hand"])
def test_a_rare_class_that_is_never_right_is_told_and_one_that_is_learned_is_not(
    kind: str, learned: bool, seed: int, tmp_path: Path
) -> None:
    """One in thirty; where it is not learned, noise hides it: the model is right in 97 % by the common class alone."""
    losses: dict[str, Loss] = {"cross-entropy": F.cross_entropy, "by hand": CHOSEN["index"], "binary": lambda p, y: F.binary_cross_entropy_with_logits(p[:, 0], y.float())}  # fmt: skip
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1 if kind == "binary" else 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for _ in range(400):
            x = torch.randn(32, 8)
            y = (x[:, 0] if learned else 0.3 * x[:, 0] + torch.randn(32)) > (1.8 if learned else 1.9)
            optimizer.zero_grad()
            losses[kind](model(x), y.long()).backward()
            optimizer.step()
    found = run.diagnose()["data.imbalance"]
    assert (found.status, "accuracy hides the rare ones" in found.summary) == (
        ("ok", False) if learned else ("warn", True)
    )


def margins(one: Tensor, other: Tensor) -> Tensor:
    return F.relu(1 - (one - other)).mean()


RANKED: dict[str, tuple[Loss, str]] = {
    "each with its own": (lambda p, _: margins(p[:, :1], p[:, 1:]), "ok"), "one of them squeezed": (lambda p, _: margins(p[:, :1].sin(), p[:, 1].sin()), "fail"),
    "all pairs of one": (lambda p, _: margins(s := p[:, :1].sin(), s.squeeze(1)), "ok"),
    "all pairs, asked for by view": (lambda p, _: margins(p[:, 0].sin().view(-1, 1), p[:, 1].sin()), "ok"),
    "all pairs, asked for by None": (lambda p, _: margins(p[:, 0].sin()[:, None], p[:, 1].sin()), "ok"),
}  # fmt: skip


@pytest.mark.parametrize("name", RANKED)
def test_two_trained_scores_whose_shapes_broadcast_are_told_and_pairs_that_are_asked_for_are_not(
    name: str, tmp_path: Path
) -> None:
    loss, status = RANKED[name]
    torch.manual_seed(0)
    found = watched(tmp_path / "run", loss, nn.Linear(4, 2), torch.randn(40, 4), torch.randn(40))["loss.broadcast"]
    assert found.status.replace("not_measured", "ok") == status, found.summary
    assert status == "ok" or "test_loop_by_hand.py" in found.summary


def exclusive(p: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(p, y)


SEVERAL: dict[str, tuple[Loss, str]] = {
    "cross-entropy": (exclusive, "warn"), "of shares": (lambda p, y: F.cross_entropy(p, y / y.sum(1, keepdim=True).clamp(min=1)), "ok"),
    "of one": (lambda p, y: F.cross_entropy(p, F.one_hot(y.argmax(1), 6).float()), "ok"), "softmax": (lambda p, y: F.binary_cross_entropy(p.softmax(1), y), "fail"),
    "softmax, of one": (lambda p, y: F.binary_cross_entropy(p.softmax(1), F.one_hot(y.argmax(1), 6).float()), "ok"),
    "sigmoid": (lambda p, y: F.binary_cross_entropy(p.sigmoid(), y), "ok"), "logits": (lambda p, y: F.binary_cross_entropy_with_logits(p, y, reduction="mean"), "ok"),
    "broken": (lambda p, y: F.cross_entropy(p, y * math.nan), "ok"), "smoothed": (lambda p, y: F.cross_entropy(p, F.one_hot(y.argmax(1), 6) * 0.9 + 0.1 / 6), "ok"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_examples_with_several_classes_that_exclude_each_other_are_told(name: str, tmp_path: Path) -> None:
    loss, status = SEVERAL[name]
    torch.manual_seed(0)
    y = (torch.rand(40, 6) < 0.4).float()
    found = watched(tmp_path / "run", loss, nn.Linear(4, 6), torch.randn(40, 4), y)["loss.double_softmax"]
    assert (found.status, "several classes" in found.summary) == (status, status != "ok"), found.summary


def test_counts_of_many_items_and_pairs_of_a_batch_are_no_classes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for items in (16, 120):
        y = (torch.rand(40, items) < 0.4).float()
        out = tmp_path / f"run{items}"
        found = watched(out, exclusive, nn.Linear(4, items), torch.randn(40, 4), y)["loss.double_softmax"]
        assert found.status == "ok", found.summary


EPISODES: dict[str, tuple[Callable[[int], float], str]] = {
    "worse": (lambda k: 20.0 if k < 20 else 9.0, "warn"), "better": (lambda k: 10.0 + k, "ok"), "first one lucky": (lambda k: 80.0 if k == 0 else 20.0, "ok"),
    "first one unlucky": (lambda k: 9.0 if k == 0 else 20.0 if k < 20 else 9.0, "warn"), "as before": (lambda k: 20.0, "ok"),
    "broken": (lambda k: math.nan, "ok"), "few": (lambda k: 20.0 if k < 20 else math.nan, "ok"),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", EPISODES)
def test_returns_of_episodes_are_held_against_those_of_the_first_tenth(name: str, seed: int, tmp_path: Path) -> None:
    """Each varies by a fifth, and one in thirty is twice as long."""
    torch.manual_seed(seed)
    returns, status = EPISODES[name]
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for k in range(120):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
            luck = (1 + 0.2 * torch.randn(()).item()) * (1 + (k % 30 == 29))
            run.log(episode_return=returns(k) * luck)
    found = run.diagnose()["loss.metric_disagrees"]
    assert found.status == status, found.summary
