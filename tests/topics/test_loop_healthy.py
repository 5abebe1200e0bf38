"""Healthy loops that look like a fault in one of the facts of it, beside the fault: `wb.watch` is silent on the one and finds the other."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import workbench as wb
from workbench.instruments.workers import Workers
from workbench.topics.loop.diagnose import CODES, diagnose_loop


def test_graphs_that_grow_with_their_inputs_go_through_no_update_before(tmp_path: Path) -> None:
    """Two heads on a shared network, whose sequences grow by a curriculum."""
    torch.manual_seed(0)
    cell, heads = nn.RNNCell(3, 8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    model = nn.ModuleDict({"cell": cell, "heads": heads})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for k in range(40):
            optimizer.zero_grad()
            state = torch.zeros(2, 8)
            for _ in range(4 * 2 ** (k // 10)):
                state = cell(torch.randn(2, 3), state)
            heads[0](state).square().mean().backward(retain_graph=True)
            heads[1](state).square().mean().backward()
            optimizer.step()
    finding = run.diagnose()["loop.retained_graph"]
    assert finding.value is not None
    assert finding.value > 5
    assert finding.status == "ok"


@pytest.mark.parametrize("constant", [2e-3, 0.3])
def test_a_constant_matters_where_it_is_a_part_of_the_loss_that_can_be_seen(constant: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(10):
            optimizer.zero_grad()
            (2.0 * (F.mse_loss(model(torch.randn(8, 3)), torch.randn(8, 1)) + constant)).backward()
            optimizer.step()
    finding = run.diagnose()["loss.floor"]
    assert finding.status == ("ok" if constant < 0.01 else "warn")
    assert "constant of" in finding.summary


@pytest.mark.parametrize(("least", "status"), [(1.0, "fail"), (1e-3, "ok")])
def test_a_bound_of_each_value_matters_where_most_lie_there(least: float, status: str, tmp_path: Path) -> None:
    """Cross-entropies of classes that a line tells apart fall below 1 in most examples, and none below 0.001 counts as a guard."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(8, 3), torch.randn(600, 8)
    targets = (inputs @ torch.randn(8, 3)).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(5):
            for batch in torch.randperm(600).split(20):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[batch]), targets[batch], reduction="none").clamp(
                    least, 20.0
                ).mean().backward()
                optimizer.step()
    finding = run.diagnose()["loss.floor"]
    assert finding.status == status, finding.summary
    assert status == "ok" or "Each value of the loss is bounded from below by 1" in finding.summary


def test_mixed_examples_have_no_wrong_labels(tmp_path: Path) -> None:
    """Mixup calls the loss twice on the same outputs, with the labels of either part; one of them alone is wrong for a third of the batches."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for rows in torch.randperm(1408).split(16):
            share, partner = float(torch.distributions.Beta(0.2, 0.1).sample()), rows[torch.randperm(16)]
            optimizer.zero_grad()
            outputs = model(share * x[rows] + (1 - share) * x[partner])
            loss = share * F.cross_entropy(outputs, y[rows]) + (1 - share) * F.cross_entropy(outputs, y[partner])
            loss.backward()
            optimizer.step()
    found = run.diagnose()
    assert {f.code for f in found if f.status in ("warn", "fail")} == set()
    assert "Does not apply" in found["data.labels"].summary, "no one label belongs to an example"


@dataclass(frozen=True)
class Study:
    """A record whose trials are the one of another, over again."""

    of: Any
    count: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    @property
    def trials(self) -> pd.DataFrame:
        return pd.concat(
            [self.of.trials.assign(trial=k, stage="lr_sweep" if k else "baseline") for k in range(self.count)]
        )

    @property
    def steps(self) -> pd.DataFrame:
        return pd.concat([self.of.steps.assign(trial=k) for k in range(self.count)], ignore_index=True)


@pytest.mark.parametrize(("decay", "told"), [(0.1, "by little"), (1.0, "pulls 1 biases")])
def test_decay_is_that_of_one_run_and_not_of_all_runs_of_a_study(decay: float, told: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(300):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
    alone = diagnose_loop(run.record)["loop.decayed_norms"]
    assert (alone.status, told in alone.summary, alone.value) == ("ok", True, pytest.approx(300 * 1e-3 * decay))
    assert diagnose_loop(Study(run.record, 6))["loop.decayed_norms"] == alone


@pytest.mark.parametrize("same", [True, False])
def test_a_second_phase_of_the_same_model_is_no_training_of_its_own(same: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    inputs, targets = torch.randn(20, 3), torch.randn(20, 1)
    last = models[0 if same else 1]
    adam, lbfgs = torch.optim.Adam(models[0].parameters()), torch.optim.LBFGS(last.parameters(), lr=0.1)
    with wb.watch(nn.ModuleList(models), [adam, lbfgs], out=tmp_path / "run") as run:
        for optimizer, model in ((adam, models[0]), (lbfgs, last)):

            def closure(optimizer: Any = optimizer, model: nn.Module = model) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            for _ in range(20):
                optimizer.step(closure)
    finding = run.diagnose()["loop.second_training"]
    assert (finding.status, "goes on with the same parameters" in finding.summary) == (
        ("ok", True) if same else ("not_measured", False)
    )


def test_a_fact_that_an_older_record_lacks_is_not_measured(tmp_path: Path) -> None:
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    with wb.watch(nn.ModuleList(models), optimizers, out=tmp_path / "run") as run:
        for _ in range(10):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                F.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 1)).backward()
                optimizer.step()
    whole = {finding.code: finding.status for finding in diagnose_loop(run.record).findings}
    for names, code in (
        (["order", "optimizers", "1", "begun"], "loop.second_training"),
        (["workers"], "data.worker_rng"),
        (["conversions"], "loop.conversion"),
        (["near_updates"], "loop.conversion"),
        (["graphs"], "loop.retained_graph"),
        (["floor"], "loss.floor"),
    ):
        record = Study(run.record, 1)
        facts = {**run.record.facts, "loop": _without(run.record.facts["loop"], names)}
        object.__setattr__(record, "facts", facts)
        found = diagnose_loop(record)
        assert [f.code for f in found.findings] == list(CODES)
        assert found[code].status == "not_measured"
        assert names[-1] in found[code].summary
        others = {f.code: f.status for f in found.findings if names[-1] not in f.summary}
        assert others == {c: s for c, s in whole.items() if c in others}


def _without(facts: Any, names: list[str]) -> Any:
    first, *rest = names
    return {key: _without(part, rest) if key == first else part for key, part in facts.items() if rest or key != first}


class Augmented(Dataset[Tensor]):
    """Adds noise to each example, from a generator that it keeps: seeded anew for each of them, or not."""

    def __init__(self, kind: str) -> None:
        self.kind, self.seeded, self.drawn = kind.removesuffix(" kept"), not kind.endswith(" kept"), torch.Generator()
        self.numpy, self.plain = np.random.default_rng(0), random.Random(0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        if self.kind == "numpy":
            if self.seeded:
                self.numpy = np.random.default_rng(7 + index)
            return torch.from_numpy(self.numpy.standard_normal((index + 1, 3))).sum(0).float()
        if self.kind == "torch":
            if self.seeded:
                self.drawn.manual_seed(7 + index)
            return torch.rand((index + 1, 3), generator=self.drawn).sum(0)
        if self.seeded:
            self.plain.seed(7 + index)
        return torch.tensor([self.plain.random() for _ in range(3 + 700 * index)][:3])


@pytest.mark.parametrize("kind", ["numpy", "torch", "random", "numpy kept", "torch kept"])
def test_workers_whose_generator_is_seeded_for_each_example_draw_alike_for_none(kind: str, tmp_path: Path) -> None:
    """Examples of their own draw numbers of their own number; the fault is told however many they draw."""
    torch.manual_seed(0)
    dataset = Augmented(kind)
    assert dataset[0].shape == (3,)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(2):
            for batch in DataLoader(dataset, 4, shuffle=True, num_workers=2):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    finding = run.diagnose()["data.worker_rng"]
    assert finding.evidence["loaders"][0]["drawn"] == ["a generator that the dataset keeps"]
    assert (finding.status, "draw the same random numbers" in finding.summary) == (
        ("warn", True) if kind.endswith("kept") else ("ok", False)
    )


def test_loaders_that_are_made_anew_are_no_epochs_of_one_another() -> None:
    workers = Workers()
    for _ in range(20):
        workers.begins(DataLoader([1, 2]), torch.ones(2, 4, 4, dtype=torch.int64))  # type: ignore[arg-type]
    rows = workers.to_dict(lambda _: True, str)
    assert len(rows) < 20, "identities were taken again"
    assert {row["epochs"] for row in rows} == {1}


def test_gradients_that_a_loop_sets_itself_have_no_norm_rather_than_one_that_is_not_finite(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 4)
    for share in (0.01, None):
        with wb.watch(model, optimizer, out=tmp_path / str(share), share=share) as run:
            for _ in range(30):
                optimizer.zero_grad()
                F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad = p.grad * 0.5
                optimizer.step()
        assert run.record.steps["grad_norm"].isna().any(), "the first that was altered unseen"
        assert run.diagnose()["clipping.nonfinite"].status == "ok"


@pytest.mark.parametrize(
    ("rows", "places", "values", "status"),
    [(2, None, 2, "warn"), (4, None, 4, "warn"), (16, None, 16, "ok"), (2, 6, 72, "ok"), (2, 1, 2, "warn")],
)
def test_batch_norm_over_next_to_no_rows_is_named_and_places_of_an_image_count(
    rows: int, places: int | None, values: int, status: str, tmp_path: Path
) -> None:
    shape = (2 * rows + 1, 3) if places is None else (2 * rows + 1, 3, places, places)
    norm = nn.BatchNorm1d(3) if places is None else nn.BatchNorm2d(3)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(3 if places is None else 3 * places**2, 1))
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(shape)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(10):
            model.train()
            for batch in (inputs[:rows], inputs[rows : 2 * rows]):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                model(inputs[:1])  # takes no statistic
    finding = run.diagnose()["batch_norm.small_batch"]
    assert (finding.value, finding.status) == (values, status)


@pytest.mark.parametrize(("copied", "status"), [("parameters", "fail"), ("buffers", None), ("nothing", None)])
def test_an_averaged_copy_needs_the_statistics_of_batch_norm(copied: str, status: str | None, tmp_path: Path) -> None:
    """A network that is copied from nowhere, as the random one of a novelty bonus, is left as it was made on purpose."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    average = copy.deepcopy(model).eval()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.05), 3 + torch.randn(64, 4)
    with wb.watch([model, average], optimizer, out=tmp_path / "run") as run:
        for k in range(120):
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, 0] > 3).long()).backward()
            optimizer.step()
            with torch.no_grad():
                pairs = [*zip(average.parameters(), model.parameters(), strict=True)] if copied != "nothing" else []
                pairs += zip(average.buffers(), model.buffers(), strict=True) if copied == "buffers" else []
                for mine, theirs in pairs:
                    mine.copy_(theirs)
                if k % 10 == 9:
                    average(x)
    found = {f.code: f.status for f in run.diagnose()}
    assert found.get("batch_norm.cold_ema") == status


@pytest.mark.parametrize("how", ["between", "once", "in turn", "looked for", "another's"])
def test_gradients_that_are_zeroed_before_any_step_are_told_and_those_thrown_away_on_purpose_are_not(
    how: str, tmp_path: Path
) -> None:
    """Two heads: both losses' gradients, those of one loss an update, of a first loss that asks where to take the second, of another optimizer's loss."""
    torch.manual_seed(0)
    trunk, heads = nn.Linear(6, 16), nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 1)])
    model, x = nn.ModuleDict({"trunk": trunk, "heads": heads}), torch.randn(640, 6)
    parts = [*trunk.parameters(), *heads[0].parameters()]
    optimizer = torch.optim.Adam(parts if how == "another's" else model.parameters(), lr=3e-3)
    other = torch.optim.Adam(heads[1].parameters(), lr=3e-3)
    with wb.watch(model, [optimizer, other] if how == "another's" else optimizer, out=tmp_path / "run") as run:
        for k, rows in enumerate(torch.randperm(640).repeat(3).split(32)):
            losses = (
                F.cross_entropy(heads[0](trunk(x[rows])), x[rows, :4].argmax(1)),
                F.mse_loss(heads[1](trunk(x[rows]).relu())[:, 0], x[rows, 0]),
            )
            optimizer.zero_grad()
            if how == "in turn":
                losses[k % 2].backward()
            elif how == "looked for":
                sum(losses).backward(retain_graph=True)
                optimizer.zero_grad()
                sum(losses).backward()
            elif how == "another's":
                losses[1].backward()
                other.step()
                other.zero_grad()
                optimizer.zero_grad()
                losses[0].backward()
            else:
                losses[0].backward()
                if how == "between":
                    optimizer.zero_grad()  # the line
                losses[1].backward()
            optimizer.step()
    found = run.diagnose()["loop.zeroed_before_step"]
    assert found.status == ("fail" if how == "between" else "ok"), found.summary
    assert how != "between" or ("heads.0.weight, heads.0.bias" in found.summary and "healthy.py" in found.summary)


@pytest.mark.parametrize(("grows", "status"), [(False, "ok"), (True, "fail")])
def test_memory_that_grows_while_everything_is_looked_at_and_then_no_more_does_not_creep(grows: bool, status: str, tmp_path: Path) -> None:  # fmt: skip
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).square().mean().backward()
            optimizer.step()
    looks = [*range(10, 200, 10), 200, 300, 400]
    memory = [[k, int(3e8 + 1.5e6 * (k if grows else min(k, 200)))] for k in looks]
    record = run.record
    record.facts["loop"] |= {"memory": memory, "updates": 400}
    assert diagnose_loop(record)["loop.memory_creep"].status == status
