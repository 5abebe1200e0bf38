"""Attention and output logits of models that the package has never seen, by their calls, names and shapes, against what each computes itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import workbench as wb
from tests.helpers.nanogpt import GPT
from workbench.instruments.losses import logits as instrument
from workbench.instruments.losses.logits import Logits
from workbench.train.batches import train_batches
from workbench.train.forward import DispatchObserver
from workbench.train.stacked_weights import build_model
from workbench.workloads.source_text import Transformer, source_data, source_lm


def looked(model: nn.Module, *given: Any, **named: Any) -> dict[str, float]:
    """What is seen of one forward pass."""
    logits = Logits()
    handle = model.register_forward_pre_hook(lambda part, args, kwargs: logits.begin(part, (*args, kwargs)), with_kwargs=True)  # fmt: skip
    model(*given, **named)
    handle.remove()
    return {name: float(value) for name, value in logits.take().items()}


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_nanogpt_is_read_by_names_and_shapes(flash: bool, named: bool) -> None:
    torch.manual_seed(0)
    model, idx = GPT(flash=flash, std=1.0), tokens(3, 16)
    seen = looked(model, idx=idx, targets=idx) if named else looked(model, idx, idx)
    layers = [float(block.attn.last) for block in model.transformer.h]
    assert [seen[f"attention_logit/transformer.h.{i}.attn"] for i in range(2)] == pytest.approx(layers, rel=1e-4)
    assert seen["attention_logit"] == pytest.approx(max(layers), rel=1e-4)
    assert seen["output_log_z"] == pytest.approx(float(model.last.logsumexp(-1).mean()), rel=1e-4)
    assert seen["output_logit"] == pytest.approx(float(model.last.abs().max()), rel=1e-4)


class Within(nn.Module):
    """A model one part of which attends."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attn(*args, **kwargs)


class Scores(nn.Module):
    """Calls `attend` on queries and keys of its own."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor) -> None:
        super().__init__()
        self.attend, self.q, self.k = attend, q, k

    def forward(self, _: Tensor) -> Tensor:
        return self.attend(self.q, self.k)


KEEP = torch.tensor([[True, True, False, True, False]])


@pytest.mark.parametrize(
    ("attend", "expected"),
    [
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), lambda q, k: q @ k.mT / 8**0.5),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, scale=2.0), lambda q, k: q @ k.mT * 2),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, KEEP), lambda q, k: (q @ k.mT / 8**0.5)[..., KEEP[0]]),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, 9.0 * KEEP), lambda q, k: q @ k.mT / 8**0.5 + 9.0 * KEEP),
        (lambda q, k: F.scaled_dot_product_attention(q, k[:, :1], k[:, :1], enable_gqa=True), lambda q, k: q @ k[:, :1].mT / 8**0.5),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), lambda q, k: (q @ k.mT / 8**0.5).masked_fill(torch.ones(5, 5).triu(1) == 1, -9.0)),
        (lambda q, k: (q @ k.mT).softmax(-1) @ k, lambda q, k: q @ k.mT),
        (lambda q, k: torch.softmax(q @ k.mT, dim=3) @ k, lambda q, k: q @ k.mT),
    ],
    ids=["plain", "scale", "mask", "bias", "shared keys", "causal", "method", "function"],
)  # fmt: skip
def test_what_a_call_computes_is_what_is_seen(attend: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many numbers, in every second position of the first head, or of a softmax in every seventh of the first example's."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    model, scores = Within(Scores(attend, q, k)), expected(q, k)
    assert looked(model, q)["attention_logit"] == pytest.approx(float(scores.max()), rel=1e-5)
    monkeypatch.setattr(instrument, "MOST", 16)
    largest = scores[0, :, ::7] if "softmax" in attend.__code__.co_names else scores[0, 0, ::2]
    assert looked(model, q)["attention_logit"] == pytest.approx(float(largest.max()), rel=1e-5)


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 4, 5, 8)])
def test_a_softmax_whose_result_multiplies_a_matrix_attends_whatever_its_module_is_called(
    shape: tuple[int, ...],
) -> None:
    q = torch.randn(shape, requires_grad=True)
    k = torch.randn(*shape[:-2], 7, 8, requires_grad=True)
    mixed = looked(Scores(lambda q, k: F.dropout((q @ k.mT).softmax(-1)) @ k, q, k), q)
    assert mixed["attention_logit"] == pytest.approx((q @ k.mT).max().item(), rel=1e-5)
    assert looked(Scores(lambda q, k: (q @ k.mT).softmax(-1).log().sum(), q, k), q) == {}


def test_a_long_sequence_is_not_computed_whole() -> None:
    """4 heads of 2,048 queries and keys: 16.8M scores."""
    q, sizes = torch.randn(1, 4, 2048, 8), []

    def note(function: Any, args: Any, kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        sizes.extend(t.numel() for t in tree_leaves(made) if isinstance(t, Tensor))
        return made

    with DispatchObserver(note):
        seen = looked(Scores(lambda q, k: F.scaled_dot_product_attention(q, k, k), q, q), q)
    assert seen["attention_logit"] > 0
    assert max(sizes) <= instrument.MOST


class Atoms(nn.Module):
    """Kinds of atoms in, coordinates out."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.out = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, kinds: Tensor) -> Tensor:
        out: Tensor = self.out(self.kinds(kinds))
        return out


def test_other_outputs_and_softmaxes_are_none_of_them() -> None:
    assert looked(Atoms(), tokens(2, 16) % 10) == {}
    assert looked(nn.Sequential(nn.Linear(8, 4), nn.Softmax(dim=-1)), torch.randn(2, 6, 6, 8)) == {}  # of classes


@pytest.mark.parametrize("within", [True, False])
def test_a_model_whose_blocks_are_compiled_is_left_alone(within: bool) -> None:
    """Dynamo guards on the functions that a look replaces, and gives up after eight of them."""
    q, logits = torch.randn(1, 2, 4, 8), Logits(every=1)
    block = Scores(lambda q, k: F.scaled_dot_product_attention(q, k, k), q, q)
    if within:
        block.compile(backend="eager", fullgraph=True)
    model = Within(block if within else torch.compile(block, backend="eager", fullgraph=True))  # type: ignore[arg-type]
    for update in range(12):
        logits.begin(model, q, update)
        model(q)
    assert logits.to_dict()["looks"] == 0
    assert logits.take() == {}


def test_a_look_that_fails_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrument, "_sizes", lambda _: torch.randn(2) @ torch.randn(3))
    assert "output_log_z" not in looked(GPT(), tokens(1, 16))


@pytest.mark.parametrize("weights", [True, False])
def test_torchs_own_attention_is_seen(weights: bool) -> None:
    torch.manual_seed(0)
    attn, x = nn.MultiheadAttention(8, 2, batch_first=True), 3 * torch.randn(3, 5, 8)
    q, k, _ = F.linear(x, attn.in_proj_weight, attn.in_proj_bias).view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    seen = looked(Within(attn), x, x, x, need_weights=weights)
    assert seen == pytest.approx({name: (q @ k.mT).max().item() / 2 for name in ("attention_logit", "attention_logit/attn")}, rel=1e-5)  # fmt: skip


def test_nothing_is_left_behind_and_what_has_no_logits_is_left_alone() -> None:
    before = F.scaled_dot_product_attention, F.softmax, torch.softmax, Tensor.softmax
    model = nn.Sequential(nn.Linear(4, 8), nn.Softmax(dim=-1), nn.Linear(8, 3))
    assert looked(model, torch.randn(5, 4)) == {}
    with pytest.raises(IndexError):
        looked(GPT(), tokens(1, 16) + 256)
    assert (F.scaled_dot_product_attention, F.softmax, torch.softmax, Tensor.softmax) == before
    assert "softmax" not in vars(Tensor)
    logits = Logits(every=1)
    for update in range(3):
        logits.begin(model, (), update)
        model(torch.randn(5, 4))
    assert logits.to_dict()["looks"] == 1


def losses(model: nn.Module, watched: Any = None) -> list[float]:
    """Train nanoGPT's loop for some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    generator, found = torch.Generator().manual_seed(0), []
    text = source_data(length=32).train.tensors

    def loop() -> None:
        for _ in range(60):
            rows = torch.randint(0, 1000, (4,), generator=generator)
            _, loss = model(text[0][rows], text[1][rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(loss.item())

    if watched is None:
        loop()
    else:
        with wb.watch(model, optimizer, out=watched) as run:
            loop()
        found.append(run)  # type: ignore[arg-type]
    return found


def test_a_watched_nanogpt_is_judged_and_trains_the_same(tmp_path: Path) -> None:
    """Queries and keys that begin 16 times too large stay so."""
    made: list[GPT] = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(GPT(layers=1))
        with torch.no_grad():
            made[-1].transformer.h[0].attn.c_attn.weight[:64] *= 16
    torch.manual_seed(1)
    alone = losses(made[0])
    torch.manual_seed(1)
    *watched, run = losses(made[1], tmp_path / "run")
    assert watched == alone
    diagnosis = run.diagnose()  # type: ignore[attr-defined]
    assert diagnosis["stability.output_logits"].status == "ok"
    assert diagnosis["stability.attention_logits"].status == "warn"
    assert "transformer.h.0.attn" in diagnosis["stability.attention_logits"].summary


@pytest.mark.parametrize("gradients", ["loop", "vmap"])
def test_every_lane_of_a_trainer_has_the_logits_of_its_own_weights(tmp_path: Path, gradients: Any) -> None:
    workload = source_lm(width=16, total_steps=40)
    configs = [workload.config.replace(peak_lr=lr) for lr in (1e-3, 0.1)]
    record = wb.lr_sweep.Study(lrs=[c.peak_lr for c in configs]).run(
        workload, wb.Trainer(gradients=gradients), out=tmp_path / "sweep"
    )
    rows = record.steps.dropna(subset="attention_logit").sort_values(["trial", "step"])
    assert rows["step"].tolist() == [0, 10, 20, 30] * 2
    low, high = (part["attention_logit"].tolist() for _, part in rows.groupby("trial"))
    assert low[0] == high[0]
    assert high[-1] > 10 * low[-1]
    model = build_model(workload, configs[0], torch.device("cpu"))
    assert isinstance(model, Transformer)
    batch = next(train_batches(workload, configs[0], torch.device("cpu")))[0][0]
    assert looked(model, batch[0])["attention_logit"] == pytest.approx(low[0], rel=1e-4)


class Counting(GPT):
    """Counts its calls, and goes by how many."""

    def __init__(self) -> None:
        super().__init__(width=16, length=64)
        self.calls = 0

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        return super().forward(idx)[0] * (1 + 0.01 * self.calls), None


class Cropped(torch.utils.data.Dataset[Any]):
    """Draws where a text begins from a generator of its own."""

    def __init__(self, data: Any) -> None:
        self.data, self.generator = data, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        start = int(torch.randint(0, 8, (), generator=self.generator))
        text, following = self.data[row]
        return text.roll(start), following.roll(start)


def test_losses_are_bitwise_equal_with_the_hook_and_without(tmp_path: Path) -> None:
    """Of a model that draws in its forward pass and counts them, and a dataset with a generator of its own."""
    found = []
    for watched in (True, False):
        workload = source_lm(width=16, total_steps=12)
        workload = workload.replace(
            build_model=Counting,
            train_data=Cropped(workload.train_data),
            forward=lambda model, batch: model(batch[0])[0],
        )
        hook = wb.hooks.Logits(every=1)
        if not watched:
            hook.on_start = lambda run: None  # type: ignore[method-assign]
        found.append(wb.Trainer(gradients="loop", hooks=[hook]).run(workload, out=tmp_path / str(watched)).steps)
    assert found[0]["attention_logit"].notna().all()
    assert found[0]["loss"].tolist() == found[1]["loss"].tolist()


class Choosing(GPT):
    """Leaves out its second block once it has learned."""

    def __init__(self) -> None:
        super().__init__(width=16, length=64)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        blocks: Any = self.transformer.h
        learned = float(blocks[0].ln_1.bias.detach().abs().max()) > 0.01
        self.transformer["h"] = blocks if not learned else nn.ModuleList([blocks[0], nn.Identity()])
        try:
            return super().forward(idx, targets)
        finally:
            self.transformer["h"] = blocks


def test_lanes_that_attend_in_other_layers_have_the_columns_of_all(tmp_path: Path) -> None:
    workload = source_lm(width=16, total_steps=12).replace(
        build_model=Choosing, forward=lambda model, batch: model(batch[0])[0]
    )
    steps = (
        wb.lr_sweep.Study(lrs=[1e-6, 0.1])
        .run(workload, wb.Trainer(gradients="loop"), out=tmp_path / "sweep")
        .steps.dropna(subset="attention_logit")
    )
    first, second = (steps.groupby("step")[f"attention_logit/transformer.h.{i}.attn"].count() for i in range(2))
    assert first.tolist() == [2, 2, 2, 2]
    assert second.tolist() == [2, 0, 0, 0]


@pytest.mark.parametrize("hidden", [False, True])
def test_a_language_model_without_a_softmax_does_not_attend_and_one_with_a_hidden_one_may(
    hidden: bool, tmp_path: Path
) -> None:
    class Letters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mixed, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 20)

        def forward(self, x: Tensor) -> Tensor:
            h = self.mixed(self.embed(x))[0]
            return self.head(SOFTMAX(h @ h.mT, -1) @ h if hidden else h)

    torch.manual_seed(0)
    model = Letters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for _ in range(110):
            x = torch.randint(20, (4, 9))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
    assert run.diagnose()["stability.attention_logits"].status == ("not_measured" if hidden else "ok")


SOFTMAX = torch.softmax  # before anybody looks, as an import by name has it
