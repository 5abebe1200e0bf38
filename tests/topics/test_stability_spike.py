"""A spike in a loop that is watched: with which update it begins, on which examples, at which learning rate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import workbench as wb

BATCH, SIZE, AT = 16, 512, 210


class Noting(Dataset[tuple[Tensor, Tensor, int]]):
    """Gives each example with its index, which the loop keeps as an oracle."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SIZE, 8, generator=draw)
        self.targets = self.inputs.sum(1, keepdim=True) + 0.3 * torch.randn(SIZE, 1, generator=draw)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


def loader_of(data: Noting, *, told: bool) -> Any:
    draw = torch.Generator().manual_seed(7)
    if told:
        return DataLoader(data, BATCH, shuffle=True, generator=draw, drop_last=True)

    class Own:
        def __iter__(self) -> Iterator[list[int]]:
            order = torch.randperm(SIZE, generator=draw).tolist()
            return (order[i : i + BATCH] for i in range(0, SIZE, BATCH))

        def __len__(self) -> int:
            return SIZE // BATCH

    return DataLoader(data, batch_sampler=Own())  # type: ignore[arg-type]


def train(
    out: Path | None, *, bad: bool = False, lr_at: dict[int, float] | None = None, scale_at: int | None = None,
    told: bool = True, ahead: bool = False, evaluated: bool = False, rule: Any = torch.optim.SGD, lr: float = 0.02, steps: int = 400,
    **watching: Any,
) -> tuple[Any, list[list[int]], Tensor]:  # fmt: skip
    """Return the watch, the examples of every update as the loop saw them, and the weights."""
    torch.manual_seed(0)
    data = Noting()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer, loader = rule(model.parameters(), lr=lr), loader_of(data, told=told)

    def epoch() -> Iterator[Any]:
        batches = iter(loader)
        if not ahead:
            yield from batches
            return
        now = next(batches, None)
        while now is not None:
            following = next(batches, None)
            yield now
            now = following

    factor = [1.0]
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * factor[0])

    def loop() -> list[list[int]]:
        seen: list[list[int]] = []
        for inputs, targets, indices in itertools.islice(
            itertools.chain.from_iterable(epoch() for _ in range(99)), steps
        ):
            optimizer.param_groups[0]["lr"] = (lr_at or {}).get(len(seen), lr)
            if evaluated and len(seen) % 30 == 0:
                with torch.no_grad():
                    for held_out, _, _ in DataLoader(data, BATCH):
                        model(held_out)
            optimizer.zero_grad()
            planted = bad and len(seen) == AT
            loss = F.mse_loss(model(inputs), targets * (40.0 if planted else 1.0))
            factor[0] = 300.0 if len(seen) == scale_at else 1.0
            loss.backward()
            seen.append(indices.tolist())
            optimizer.step()
        return seen

    if out is None:
        return None, loop(), nn.utils.parameters_to_vector(model.parameters()).detach()
    with wb.watch(model, optimizer, out=out, **watching) as run:
        seen = loop()
    return run, seen, nn.utils.parameters_to_vector(model.parameters()).detach()


def spike(run: Any) -> Any:
    """The finding of the rise, whichever of the two codes has it."""
    found = run.diagnose()
    hits = [found[code] for code in ("stability.spike", "stability.mid") if found[code].evidence.get("update")]
    return hits[0] if hits else None


@pytest.mark.parametrize(("ahead", "evaluated"), [(False, False), (False, True), (True, True)])
def test_the_examples_of_a_bad_batch_are_named(ahead: bool, evaluated: bool, tmp_path: Path) -> None:
    """Also where the loop draws one batch more than it has used, and where an evaluation stands right before the update."""
    run, seen, weights = train(tmp_path / "run", bad=True, ahead=ahead, evaluated=evaluated)
    _, alone, same = train(None, bad=True, ahead=ahead, evaluated=evaluated)
    assert seen == alone, "the draw is not changed"
    assert torch.equal(weights, same)
    found = spike(run)
    assert found.evidence["update"]["update"] == AT
    assert found.evidence["update"]["examples"] == seen[AT]
    assert f"It begins with update {AT}: " in found.summary
    assert f"examples {', '.join(map(str, seen[AT][:8]))} and 8 more" in found.summary


def test_a_batch_whose_sampler_tells_nothing_is_known_by_its_values(tmp_path: Path) -> None:
    run, seen, _ = train(tmp_path / "run", bad=True, told=False)
    found = spike(run).evidence["update"]
    assert (found["update"], found["examples"]) == (AT, None)
    expected = Noting().inputs[seen[AT]]
    assert found["batch"]["shape"] == list(expected.shape)
    assert found["batch"]["sum"] == pytest.approx(float(expected.sum()), rel=1e-4)


def test_a_jump_of_the_learning_rate_is_named(tmp_path: Path) -> None:
    run, _, _ = train(tmp_path / "run", lr_at=dict.fromkeys(range(AT, AT + 4), 1.0))
    found = spike(run)
    assert found.evidence["cause"] == "schedule"
    assert (found.evidence["update"]["update"], found.evidence["update"]["lr"]) == (AT, 1.0)
    assert f"It begins with update {AT}: learning rate 1, 0.02 before" in found.summary


def test_a_gradient_that_adam_was_not_ready_for_is_named(tmp_path: Path) -> None:
    """Its ratio against the optimizer's own state, read before the update."""
    rule, ratios = torch.optim.Adam, []

    def noting(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = rule(parameters, lr=lr, betas=(0.5, 0.999))

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            squares = sum(float(p.grad.square().sum()) for g in optimizer.param_groups for p in g["params"])
            moment = sum(
                float(s["exp_avg_sq"].sum()) / (1 - 0.999 ** float(s["step"])) for s in optimizer.state.values()
            )
            ratios.append(squares / moment if moment else None)

        optimizer.register_step_pre_hook(before)
        return optimizer

    run, _, _ = train(tmp_path / "run", scale_at=AT, rule=noting, lr=0.05, share=None)  # every norm is known
    found = spike(run)
    assert found.evidence["update"]["update"] == AT
    assert found.evidence["update"]["second_moment_ratio"] == pytest.approx(ratios[AT], rel=1e-3)
    assert ratios[AT] > 10
    assert "times the optimizer's second moment" in found.summary


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.Adam])
def test_a_healthy_run_names_no_update(rule: Any, tmp_path: Path) -> None:
    run, _, _ = train(tmp_path / "run", rule=rule)
    found = run.diagnose()
    assert [found[code].status for code in ("stability.spike", "stability.mid")] == ["ok", "ok"]
    assert "It begins with" not in "".join(f.summary for f in found)
