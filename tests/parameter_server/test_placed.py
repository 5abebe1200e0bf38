"""Modules whose parameters live on servers: the same updates as in one process, exactly once, with their slots (T1, T14.2)."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.killed_programs import wait_until
from workbench.config import TrainConfig
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.context import Alive, Run, Token
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.errors import NonFiniteError
from workbench.parameter_server.servers import replicas
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.server import ServerRuntime
from workbench.parameter_server.servers.variable import Variable
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.checkpoint_manager import CheckpointManager


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def config(**fields: Any) -> TrainConfig:
    return TrainConfig(**{"peak_lr": 0.05, "total_steps": 40, "batch_size": 8, "optimizer": "sgd"} | fields)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        yield x, torch.sin(x[:, :3])


def train(placed: PlacedModule, iterator: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    x, y = next(iterator)
    with placed.step() as model:
        loss: Tensor = ((model(x) - y) ** 2).mean()
        loss.backward()
    return loss


def test_the_lr_follows_the_servers_own_steps(own_cluster: Any) -> None:
    """T13.2: the schedule is a function of the step, no variable that everybody asks for."""
    strategy = ParameterServerStrategy(own_cluster(1, 2))
    fields = config(peak_lr=0.1, total_steps=4, schedule="linear", warmup_steps=2)
    placed = strategy.place(nn.Linear(1, 1, bias=False).double(), fields)
    before = placed.module().weight.item()
    moved = []
    for _ in range(6):
        with placed.step() as model:
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        after = placed.module().weight.item()
        moved.append(before - after)
        before = after
    from workbench.schedules import lr_values

    planned = lr_values(fields).tolist()
    assert moved == pytest.approx([*planned, planned[-1], planned[-1]])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_another_lr_leaves_the_slots_as_they_are(strategy: ParameterServerStrategy, optimizer: str) -> None:
    """T8.2: with the same lr again nothing has changed, with half of it the next update is half as large."""
    fields = config(optimizer=optimizer)
    one, same, half = (strategy.place(net(), fields) for _ in range(3))
    data = batches()
    for _ in range(4):
        x, y = next(data)
        for placed in (one, same, half):
            train(placed, iter([(x, y)]))
    same.reconfigure(fields.replace(peak_lr=fields.peak_lr))
    half.reconfigure(fields.replace(peak_lr=fields.peak_lr / 2))
    before = one.state_dict()["parameters"]
    x, y = next(data)
    for placed in (one, same, half):
        train(placed, iter([(x, y)]))
    after = [placed.state_dict()["parameters"] for placed in (one, same, half)]
    for key, value in before.items():
        assert torch.equal(after[0][key], after[1][key])
        torch.testing.assert_close(after[2][key] - value, (after[0][key] - value) / 2)


def test_a_server_forgets_the_writes_of_what_ended_and_of_nothing_else() -> None:
    """T6.4: a closure that may run again is remembered, however long ago it wrote and however much others did; memory has an end."""
    runtime = ServerRuntime(0)
    runtime.create("counts", torch.zeros(1))

    def add(closure: int, write: int, stamp: int, *alive: int) -> int:
        token = Token(Run(0, closure, Alive(stamp, max(alive), alive)), write)
        return runtime.write("counts", torch.ones(1), "add", token)

    assert [add(0, write, 1, 0) for write in range(3)] == [1, 2, 3]
    for closure in range(1, 20_001):
        add(closure, 0, 2 * closure, 0, closure)
    assert [add(0, write, 40_001, 0, 20_000) for write in range(4)] == [1, 2, 3, 20_004], (
        "the versions of the first run"
    )
    assert runtime.read("counts")[0].item() == 20_004
    assert len(runtime._blocks["counts"].written[0]._counts) == 2, "those that may run again"
    add(20_001, 0, 40_003, 20_001)
    assert add(20_000, 0, 40_002, 0, 20_000) == 20_005, "what is left of a closure that ended elsewhere changes nothing"
    assert len(runtime._blocks["counts"].written[0]._counts) == 1


class Tuned(nn.Module):
    """Something frozen, something with buffers, something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.tensor([7.0]), requires_grad=False)
        self.norm, self.weight = nn.BatchNorm1d(1, affine=False), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).sum() * 0.0 + self.weight * self.given


def look(placed: PlacedModule) -> tuple[float, float]:
    """A step: what the module gives, and the mean that its batch norm has seen."""
    with placed.step() as model:
        out = model(torch.tensor([[1.0], [3.0]]))
        out.sum().backward()
        return out.item(), model.norm.running_mean.item()


def test_what_is_restored_or_reconfigured_reaches_replicas_that_workers_have(
    lone_cluster: Cluster, tmp_path: Path
) -> None:
    """A new max_grad_norm, what a checkpoint says of frozen parameters and buffers, also where the function was sent before."""
    strategy = ParameterServerStrategy(lone_cluster)
    coordinator = ClusterCoordinator(strategy)
    other = strategy.place(Tuned(), config(peak_lr=1.0, max_grad_norm=1e-9))
    with torch.no_grad():
        other._module.given.fill_(5.0)
    CheckpointManager(other, tmp_path).save()
    placed = strategy.place(Tuned(), config(peak_lr=1.0, max_grad_norm=1e-9))
    held = coordinator.per_worker(partial(tuple, [placed]))
    captured = lambda held: look(held[0])  # noqa: E731
    assert coordinator.schedule(look, args=(placed,)).fetch() == pytest.approx((7.0, 0.2))
    assert coordinator.schedule(captured, args=(held,)).fetch()[0] == pytest.approx(7.0)
    CheckpointManager(placed, tmp_path).restore()
    assert coordinator.schedule(look, args=(placed,)).fetch() == pytest.approx((5.0, 0.2)), "statistics began anew"
    assert coordinator.schedule(captured, args=(held,)).fetch() == pytest.approx((5.0, 0.38)), "once"
    placed.reconfigure(config(peak_lr=1.0, max_grad_norm=0.5))
    coordinator.schedule(captured, args=(held,)).fetch()
    assert placed.module().weight.item() == pytest.approx(0.5), "1 - lr * 0.5"
    assert float(placed.module().given) == 5.0
    coordinator.shutdown()


def test_what_nobody_holds_is_freed(lone_cluster: Cluster) -> None:
    """Blocks on the servers and replicas on the workers, of variables and modules; what waits to run is held."""
    strategy = ParameterServerStrategy(lone_cluster)
    coordinator = ClusterCoordinator(strategy)

    def blocks() -> set[str]:
        return {name for k in range(2) for name in lone_cluster.engine.plane.ask(k, "load_report")}

    before = blocks()
    for _ in range(3):
        placed, total = strategy.place(net(), config()), strategy.variable([1.0, 2.0])
        coordinator.schedule(
            train_and_count,
            args=(placed, total),
        )
    coordinator.join()
    assert len(blocks() - before) >= 3 * 2
    name = placed.name
    del placed, total
    gc.collect()
    wait_until(lambda: blocks() <= before)
    assert not coordinator.on_every_worker(replicas_of, (lone_cluster.id, name))[0]
    coordinator.shutdown()


def train_and_count(placed: PlacedModule, total: Variable) -> None:
    train(placed, batches())
    total.assign_add(1.0)


def replicas_of(cluster: str, name: str) -> list[Any]:
    return [key for key in replicas._REPLICAS if key[:2] == (cluster, name)]


def test_gradients_are_clipped_before_they_are_sent(strategy: ParameterServerStrategy) -> None:
    placed = strategy.place(nn.Linear(4, 1, bias=False).double(), config(peak_lr=1.0, max_grad_norm=0.5))
    before = placed.module().weight.detach().clone()
    with placed.step() as model:
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert (before - placed.module().weight).norm().item() == pytest.approx(0.5)


def test_a_gradient_that_is_not_finite_is_named_and_not_sent(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy
) -> None:
    """T12.1: pushed once, it would make every value on the servers NaN."""
    placed = strategy.place(net(), config())
    before = placed.state_dict()["parameters"]

    def diverge() -> None:
        with placed.step() as model:
            (model(torch.ones(1, 5, dtype=torch.float64)).sum() * float("nan")).backward()

    coordinator.schedule(diverge)
    with pytest.raises(NonFiniteError, match=r"the gradient of 0.weight, .* is NaN or infinite on worker \d \(4 of 4"):
        coordinator.join()
    assert placed.steps == 0
    assert all(torch.equal(value, before[key]) for key, value in placed.state_dict()["parameters"].items())


def test_a_parameter_without_a_gradient_stays(strategy: ParameterServerStrategy) -> None:
    placed = strategy.place(net(), config())
    with pytest.raises(RuntimeError, match="planted"), placed.step():
        raise RuntimeError("planted")
    assert placed.steps == 0, "nothing is pushed where the step raises"
    before = copy.deepcopy(placed.module().state_dict())
    with placed.step() as model:
        next(iter(model.parameters())).sum().backward()
    after = placed.module().state_dict()
    assert [key for key in before if not torch.equal(before[key], after[key])] == ["0.weight"]


def test_staleness_is_counted(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy) -> None:
    """T1.2: alone there is none; where a replica is read and another one is faster, it is how many were."""
    placed = strategy.place(net(), config())
    for _ in range(4):
        with placed.step() as model:
            model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    late = placed.pull()
    versions = list(late.versions)
    loss = late.module(torch.ones(1, 5, dtype=torch.float64)).sum()
    gradients = torch.autograd.grad(loss, list(late.module.parameters()))
    for _ in range(2):
        with placed.step() as model:
            model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    late.versions[:] = versions
    for parameter, gradient in zip(late.module.parameters(), gradients, strict=True):
        parameter.grad = gradient
    placed.push(late)
    for place in placed.places:
        row = strategy.cluster.engine.plane.ask(place.server, "load_report")[place.block]
        assert row["staleness_steps"] == {0: 6, 2: 1}


def test_slots_lie_beside_their_shard(cluster: Cluster) -> None:
    """Behaviour 72: momentum of each block on its own server, as long as the block."""
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(2))
    placed = strategy.place(net(), config(optimizer="momentum"))
    sizes = {server: sum(part.size for part in held) for server, held in placed.parts.items()}
    assert sum(sizes.values()) == sum(parameter.numel() for parameter in net().parameters())
    for place in placed.places:
        state = cluster.engine.plane.ask(place.server, "state", place.block)
        assert [slot.numel() for slot in state["slots"].values()] == [sizes[place.server]]
