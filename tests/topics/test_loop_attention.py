"""What a watch looks at after the first updates: rarely, at what stands out, and at enough for what begins late."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from workbench.instruments.losses.attention import AFTER, FIRST, WINDOW, Attention
from workbench.topics.loop.diagnose import diagnose_loop

STEPS = 700
LEAST = 1e-9
"""A share that no look can keep to: late, one update in 4 * `every` is looked at."""


def train(
    out: Path, *, share: float | None = LEAST, clip: float | None = None, scale_at: int | None = None, bad_at: int | None = None,
    kept_from: int | None = None, nan_from: int = STEPS, evaluating_from: int | None = None, steps: int = STEPS,
) -> tuple[Any, list[float], list[float]]:  # fmt: skip
    """Return the watch, and the losses and gradient norms that the loop saw itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, norms = [], []
    with wb.watch(model, optimizer, out=out, share=share, every=12) as run:
        for k in range(steps):
            x = torch.randn(16, 4)
            y = x.sum(1, keepdim=True) + (40.0 if k == bad_at else math.nan if k >= nan_from else 0.0)
            if kept_from is None or k < kept_from:
                optimizer.zero_grad()
            model.train(evaluating_from is None or k < evaluating_from)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            for p in model.parameters() if k == scale_at else ():
                assert p.grad is not None
                p.grad.mul_(300.0)
            losses.append(loss.item())
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return run, losses, norms


def test_every_loss_and_some_norms_are_there_and_the_rest_is_said_to_be_passed_over(tmp_path: Path) -> None:
    run, losses, norms = train(tmp_path / "run")
    _, alone, _ = train(tmp_path / "all", share=None)
    steps = run.record.steps
    assert steps["loss"].tolist() == losses == alone
    looked = steps["looked"].to_numpy() == 1
    assert looked[:FIRST].all()
    assert (WINDOW - FIRST) / 40 <= looked[FIRST:WINDOW].sum() <= (WINDOW - FIRST) / 10
    assert (STEPS - WINDOW) / 100 <= looked[WINDOW:].sum() <= (STEPS - WINDOW) / 10
    assert steps["grad_norm"].notna().tolist() == looked.tolist()
    assert steps["grad_norm"][looked].tolist() == pytest.approx(np.array(norms)[looked].tolist(), rel=1e-5)
    told = run.record.facts["loop"]["attention"]
    assert (told["every"], told["share"]) == (48, LEAST)
    assert FIRST + 10 < told["looked"] < looked.sum()  # some norms are taken where nothing else is looked at
    found = run.diagnose()
    assert [f.code for f in found.findings if f.status in ("warn", "fail")] == []
    assert found["clipping.nonfinite"].status == "ok"


def test_a_loss_that_stays_no_number_is_looked_at_once_and_not_for_ever(tmp_path: Path) -> None:
    broken = train(tmp_path / "run", nan_from=300)[0].record
    healthy = train(tmp_path / "healthy")[0].record
    assert broken.facts["loop"]["attention"]["roused"] <= healthy.facts["loop"]["attention"]["roused"] + 2
    assert broken.steps["looked"].sum() <= healthy.steps["looked"].sum() + 2 * AFTER


def test_complex_parameters_are_watched_to_the_end(tmp_path: Path) -> None:
    model = nn.ParameterList([torch.randn(3, dtype=torch.cfloat), torch.randn(50)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=LEAST) as run:
        for _ in range(100):
            optimizer.zero_grad()
            sum(p.abs().square().sum() for p in model).backward()
            optimizer.step()
    assert len(run.record.steps) == 100


class Counted(nn.Module):
    """A language model that counts what runs in its forward and backward passes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.embedding, self.block, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)
        if how == "module":
            self.block.register_full_backward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        self.count()
        return self.block(x).tanh()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.blocks, x, use_reentrant=False) if self.how == "checkpoint" else self.blocks(x)
        if self.how == "tensor":
            x.register_hook(self.count)
        elif self.how == "node":
            x.grad_fn.register_hook(self.count)
        elif self.how == "node before":
            x.grad_fn.register_prehook(self.count)
        return self.head(x)


@pytest.mark.parametrize(
    ("how", "calls"), [("module", 2), ("tensor", 2), ("node", 2), ("node before", 2), ("checkpoint", 2), ("", 1)]
)
def test_what_a_program_runs_in_its_backward_pass_runs_as_often_as_unwatched(
    how: str, calls: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Counted(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(10):
            tokens = torch.randint(0, 20, (4, 9))
            optimizer.zero_grad()
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    assert model.calls == 10 * calls
    assert diagnose_loop(run.record)["loop.sees_target"].status == ("not_measured" if how else "ok")


@pytest.mark.parametrize(("turned", "status"), [(True, "ok"), (False, "fail")])
def test_outputs_in_the_order_of_their_targets_are_well_whichever_axis_comes_first(
    turned: bool, status: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Counted("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(10):
            tokens = torch.randint(0, 20, (9, 4))  # (length, batch)
            outputs = model(tokens[:-1])
            outputs = outputs.transpose(0, 1) if turned else outputs
            optimizer.zero_grad()
            F.cross_entropy(outputs.reshape(-1, 20), tokens[1:].T.reshape(-1)).backward()
            optimizer.step()
    found = diagnose_loop(run.record)
    assert [found[code].status for code in ("loss.broadcast", "loop.batch_dependence")] == [status, "ok"]
    assert found["loop.sees_target"].status == ("ok" if turned else "not_measured")


def test_copies_of_a_watched_model_are_their_own_and_its_class_is_afterwards_as_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, forward = Counted(""), Counted.forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 20, (4, 9))
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(WINDOW + 50):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
        emptied = copy.deepcopy(model)
        for p in emptied.parameters():
            p.data.zero_()
        assert not emptied(tokens).any()
        assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), model(tokens))
    assert len(run.record.steps) == WINDOW + 50
    assert Counted.forward is forward
    assert not model._forward_pre_hooks


def test_a_share_of_none_looks_at_every_update(tmp_path: Path) -> None:
    run, _, norms = train(tmp_path / "run", share=None, steps=WINDOW + 50)
    assert run.record.steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)


def test_norms_are_those_before_a_change_by_hand_also_where_nothing_else_is_looked_at(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    norms = []
    with wb.watch(model, optimizer, out=tmp_path / "run", every=5) as run:
        for k in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(float(nn.utils.get_total_norm(grads)))
            for grad in grads if k >= 2 * WINDOW else ():
                grad.mul_(0.5)
            optimizer.step()
    found = run.record.steps["grad_norm"]
    seen = found.notna()
    assert seen[: 2 * WINDOW].sum() > run.record.facts["loop"]["attention"]["looked"] / 2
    assert found[seen].tolist() == pytest.approx(np.array(norms)[seen].tolist(), rel=1e-5)


def test_a_loop_that_clips_has_a_norm_for_every_update(tmp_path: Path) -> None:
    run, _, norms = train(tmp_path / "run", clip=0.5)
    steps = run.record.steps
    assert steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)
    assert (steps["clipped"] == 1).tolist() == [norm > 0.5 for norm in norms]


def test_what_is_passed_over_has_the_same_rows_and_counts_as_what_is_looked_at(tmp_path: Path) -> None:
    """Two passes an update, two groups under a schedule, a loader, evaluations, and a loss that the loop logs itself now and then."""
    found = []
    for share in (None, LEAST):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
        optimizer = torch.optim.SGD(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=90)
        x = torch.randn(64, 4)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
        with wb.watch(model, optimizer, out=tmp_path / str(share), share=share) as run:
            for epoch in range(100):
                model.train()
                for k, (inputs, targets) in enumerate(loader):
                    loss = F.mse_loss(model(inputs), targets * (30.0 if epoch == 71 and k == 4 else 1.0)) / 2
                    loss.backward()
                    if k % 2:
                        if epoch % 10 == 9:
                            run.log(loss=loss * 2)
                        optimizer.step()
                        optimizer.zero_grad()
                        schedule.step()
                model.eval()
                with torch.no_grad():
                    for inputs, _ in loader:
                        model(inputs)
        loop = run.record.facts["loop"]
        steps = run.record.steps[["step", "loss", "lr", "lr/group1"]]
        assert run.record.steps["data_wait_s"].notna().all()
        notes = {note["update"]: note["examples"] for note in loop["batches"]["updates"]}
        found.append(
            (
                steps,
                loop["loaders"]["loaders"],
                loop["schedulers"],
                loop["order"]["backwards"],
                loop["modes"]["models"][0]["runs"],
                notes[71 * 4 + 2],
            )
        )
    (all_steps, *others), (some_steps, *same) = found
    pd.testing.assert_frame_equal(all_steps, some_steps, check_exact=False, rtol=1e-6)
    assert others == same


@pytest.mark.parametrize("what", ["bad_at", "scale_at"])
def test_an_update_that_stands_out_is_looked_at_with_those_after_it(what: str, tmp_path: Path) -> None:
    at = 431
    run, _, norms = train(tmp_path / "run", **{what: at})  # type: ignore[arg-type]
    steps = run.record.steps
    assert steps["looked"].tolist()[at : at + 1 + AFTER] == [1.0] * (1 + AFTER)
    assert steps["grad_norm"][at] == pytest.approx(norms[at], rel=1e-5)
    assert norms[at] > 5 * np.median(norms[:at])


@pytest.mark.parametrize(
    ("fault", "code"),
    [("kept_from", "loop.no_zero_grad"), ("evaluating_from", "loop.eval_mode_in_training")],
)
def test_a_fault_that_begins_after_the_first_updates_is_found(fault: str, code: str, tmp_path: Path) -> None:
    run, _, _ = train(tmp_path / "run", steps=1500, **{fault: 2 * WINDOW})  # type: ignore[arg-type]
    assert run.diagnose()[code].status == "fail"
    order = run.record.facts["loop"]["order"]
    assert sum(order["orders"].values()) == pytest.approx(1500, rel=0.1)


@pytest.mark.parametrize("kept", [False, True])
def test_two_optimizers_whose_calls_are_interleaved_are_judged_by_whole_updates(kept: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    rules = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    with wb.watch(models, rules, out=tmp_path / "run", share=LEAST) as run:
        for k in range(1500):
            for number, rule in enumerate(rules):
                if not (kept and number == 1 and k > WINDOW):
                    rule.zero_grad()
            x = torch.randn(8, 3)
            for model in models:
                F.mse_loss(model(x), x[:, :2]).backward()
            for rule in rules:
                rule.step()
    found = run.diagnose()["loop.no_zero_grad"]
    assert found.status == ("fail" if kept else "ok")
    assert found.value == (pytest.approx(0.87, abs=0.15) if kept else 0.0)


def cadence(cost: float, step: float, share: float) -> int:
    attention = Attention(share, most=50)
    for k in range(400):
        attention.spent = cost if attention.awake else 0.0
        attention.updated(k + 1, (k + 1) * (step + cost), pairs=False)
    return attention.every


def test_the_cadence_follows_from_what_looks_cost_and_never_falls_behind_its_least() -> None:
    assert cadence(0.95e-4, 1e-3, 0.01) == 13
    assert cadence(1e-4, 1.0, 0.01) == 1
    assert cadence(1e-4, 1e-6, 0.01) == 200


@pytest.mark.parametrize("pairs", [False, True])
def test_a_look_sees_both_steps_of_a_pair(pairs: bool) -> None:
    attention, awake = Attention(0.01, most=50), []
    for k in range(4000):
        awake.append(attention.awake)
        attention.spent = 2e-4 if attention.awake else 0.0
        attention.updated(k + 1, (k + 1) * (1e-3 + 2e-4), pairs=pairs)
    late = "".join("x" if each else " " for each in awake[WINDOW:]).split()
    assert {len(look) for look in late[1:-1]} >= {1 + pairs}
    assert pairs is False or all(len(look) % 2 == 0 for look in late[1:-1])


def test_looks_of_changing_distance_are_one_in_every_on_the_mean() -> None:
    attention = Attention(0.01, most=50)
    at = []
    for k in range(20_000):
        if attention.awake and k >= WINDOW:
            at.append(k)
        attention.spent = 2e-4 if attention.awake else 0.0
        attention.updated(k + 1, (k + 1) * (1e-3 + 2e-4), pairs=False)
    assert len(at) == pytest.approx((20_000 - WINDOW) / 27, rel=0.05)
    gaps = np.diff(at)
    assert (gaps.min(), gaps.max()) == (1, 53)


@pytest.mark.parametrize("losses", [[1.0] * 300, [math.nan] * 300, [1.0 / (k + 1) for k in range(300)], [1.0]])
def test_a_constant_a_falling_and_a_loss_that_is_no_number_rouse_at_most_once(losses: list[float]) -> None:
    attention = Attention(0.01, most=50)
    for loss in losses:
        attention.saw(loss)
    assert attention.to_dict()["roused"] == float(math.isnan(losses[0]))


@pytest.mark.parametrize("updates", [0, WINDOW + 5 * AFTER])
def test_backward_passes_without_an_update_are_kept_as_their_sum(tmp_path: Path, updates: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    given, held = 0.0, []

    def backward() -> None:
        nonlocal given
        loss = model(torch.randn(40, 2)).square().mean()  # the first 20,000 examples are digested: 500 passes
        loss.backward()
        given += loss.item()

    with wb.watch(model, optimizer, out=tmp_path / "run", share=LEAST) as run:
        for _ in range(updates):
            optimizer.zero_grad()
            backward()
            optimizer.step()
        given = 0.0
        tracemalloc.start()
        for k in range(3000):
            backward()
            if k % 1000 == 999:
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        optimizer.step()
    assert run.record.steps["loss"].iloc[-1] == pytest.approx(given, rel=1e-5)
    assert held[-1] - held[0] < 2000 * 16, held  # bytes; a number that is kept takes 32
