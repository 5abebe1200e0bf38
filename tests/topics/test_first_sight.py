"""What a watched loop tells of parameters that are frozen and of its inputs, where types and shapes are out of the ordinary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import workbench as wb
from workbench.findings.diagnosis import Diagnosis

FROZEN = "loop.frozen_random"


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def watched(
    out: Path, model: nn.Module, x: torch.Tensor, other: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like
) -> Diagnosis:
    """Train for ten updates; `other` makes a target from the inputs."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with wb.watch(model, optimizer, out=out) as run:
        for _ in range(10):
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = other(x)
            (model(x).sum() - wanted.sum()).square().backward()
            optimizer.step()
    return run.diagnose()


def half_frozen() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    return model


def test_a_frozen_layer_that_is_sharded_is_looked_at_as_any_other(tmp_path: Path, alone: None) -> None:
    x = torch.randn(8, 16)
    plain = watched(tmp_path / "plain", half_frozen(), x)[FROZEN]
    model = half_frozen()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    sharded = watched(tmp_path / "sharded", model, x)[FROZEN]
    assert (sharded.status, sharded.summary) == (plain.status, plain.summary)
    assert plain.status == "warn"


class Odd(nn.Module):
    """A layer that is trained and one that is frozen, beside frozen ones of which nothing can be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.body = half_frozen()
        self.rest = nn.ModuleList([nn.Linear(0, 4), nn.Linear(4, 0), nn.Linear(4, 4, device="meta")])
        self.rest.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_frozen_parameters_without_values_hide_no_others(tmp_path: Path) -> None:
    found = watched(tmp_path / "odd", Odd(), torch.randn(8, 16))[FROZEN]
    assert (found.status, "body.0.weight" in found.summary) == ("warn", True)


def test_a_target_network_is_frozen_for_good_reasons_and_another_network_is_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    q = half_frozen().requires_grad_(True)
    target = copy.deepcopy(q).requires_grad_(False)
    assert judged(tmp_path / "target", q, target, x) == "ok"
    q = half_frozen().requires_grad_(True)
    assert judged(tmp_path / "other", q, nn.Linear(16, 32).requires_grad_(False), x) == "warn"


def judged(out: Path, q: nn.Module, frozen: nn.Module, x: torch.Tensor) -> str:
    optimizer = torch.optim.SGD(q.parameters(), lr=0.01)
    with wb.watch([q, frozen], optimizer, out=out) as run:
        for _ in range(10):
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = frozen(x).mean()
            (q(x).mean() - wanted).square().backward()
            optimizer.step()
    return run.diagnose()[FROZEN].status


def test_one_example_does_not_tell_that_inputs_never_vary(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = watched(tmp_path / "one", half_frozen(), torch.randn(1, 16))["data.scale"]
    assert (found.status, "two examples" in found.summary) == ("not_measured", True)
    assert watched(tmp_path / "two", half_frozen(), torch.randn(2, 16))["data.scale"].status == "ok"
    still = watched(tmp_path / "still", half_frozen(), torch.ones(2, 16))["data.scale"]
    assert "never vary" in still.summary
