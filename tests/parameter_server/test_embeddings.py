"""Tables of embeddings on servers: only rows move, and each rule is that of its oracle (T3.7, behaviour 75)."""

from __future__ import annotations

import contextlib
import copy
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import CheckpointError, UsageError
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.data.string_lookup import StringLookup
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.row_rules import RowRule
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.checkpoint_manager import CheckpointManager

ROWS, WIDTH, LR = 5000, 16, 0.05


class Net(nn.Module):
    """Two tables, one of them a bag with padding, and a layer."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=3, sparse=sparse)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=sparse)
        self.dense = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.dense(self.words(ids).sum(1) + self.bags(ids) + self.words(ids[:, :1]).sum(1))
        return found


def net(*, sparse: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(sparse=sparse).double()


def config(**fields: Any) -> TrainConfig:
    return TrainConfig(**{"peak_lr": LR, "total_steps": 100, "batch_size": 8, "optimizer": "sgd"} | fields)


def batches(count: int = 12) -> list[Tensor]:
    """Ids of which some come again and again, and one is the padding."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.cat([torch.randint(ROWS, (8, 3), generator=generator), torch.randint(5, (8, 2), generator=generator)], 1)
        for _ in range(count)
    ]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = (model(ids) - 1.0).square().mean()
    return found


def train(placed: PlacedModule, ids: Tensor) -> float:
    with placed.step() as model:
        loss = loss_of(model, ids)
        loss.backward()
        assert sum(each.numel() for each in model.parameters()) < ROWS, "a worker holds no table"
    return loss.item()


def momentum_of_the_batch(table: nn.Parameter) -> Callable[[], None]:
    slot = torch.zeros_like(table.data)

    def step() -> None:
        grad: Any = table.grad
        rows = grad.coalesce().indices()[0]
        slot[rows] = 0.9 * slot[rows] + grad.to_dense()[rows]
        table.data[rows] -= LR * slot[rows]

    return step


def adagrad_of_torch(table: nn.Parameter) -> Callable[[], None]:
    """Where a gradient is 0 Adagrad changes nothing, so that a dense one says the same; on a sparse one torch warns."""
    optimizer = torch.optim.Adagrad([table], lr=LR, eps=1e-8)

    def step() -> None:
        table.grad = None if table.grad is None else table.grad.to_dense()
        optimizer.step()

    return step


def ftrl_of_the_paper(table: nn.Parameter, beta: float = 1.0, l1: float = 0.01, l2: float = 0.1) -> Callable[[], None]:
    """McMahan et al. 2013, algorithm 1, coordinate by coordinate."""
    z, n = np.zeros(table.shape), np.full(table.shape, 0.1)

    def step() -> None:
        grad: Any = table.grad
        values = table.data.numpy()
        for row in grad.coalesce().indices()[0].tolist():
            for k, g in enumerate(grad.to_dense()[row].tolist()):
                sigma = ((n[row, k] + g * g) ** 0.5 - n[row, k] ** 0.5) / LR
                z[row, k] += g - sigma * values[row, k]
                n[row, k] += g * g
                small = abs(z[row, k]) <= l1
                values[row, k] = (
                    0.0 if small else -(z[row, k] - np.sign(z[row, k]) * l1) / ((beta + n[row, k] ** 0.5) / LR + l2)
                )

    return step


SPARSE: dict[str, Callable[[nn.Parameter], Callable[[], Any]]] = {
    "sgd": lambda table: torch.optim.SGD([table], lr=LR).step,
    "lazy_momentum": momentum_of_the_batch,
    "lazy_adam": lambda table: torch.optim.SparseAdam([table], lr=LR).step,
    "adagrad": adagrad_of_torch,
    "ftrl": ftrl_of_the_paper,
}


def compare(
    strategy: ParameterServerStrategy, embeddings: Any, oracle: nn.Module, step: Callable[[], None], **fields: Any
) -> PlacedModule:
    """Train on servers and here, and hold the losses and every value against each other."""
    coordinator = ClusterCoordinator(strategy)
    placed = strategy.place(net(), config(**fields), embeddings=embeddings)
    assert {*placed.tables} == {"words.weight", "bags.weight"}
    for ids in batches():
        ours = coordinator.schedule(train, args=(placed, ids)).fetch()
        oracle.zero_grad()
        loss = loss_of(oracle, ids)
        loss.backward()
        if fields.get("max_grad_norm"):
            nn.utils.clip_grad_norm_(oracle.parameters(), fields["max_grad_norm"])
        step()
        assert ours == pytest.approx(loss.item(), rel=1e-9)
    trained = placed.module()
    assert {type(each) for each in trained.modules()} == {Net, nn.Embedding, nn.EmbeddingBag, nn.Linear}
    for key, value in oracle.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[key], value, rtol=1e-8, atol=1e-10)
    assert placed.steps == len(batches())
    return placed


@pytest.mark.parametrize("rule", sorted(SPARSE))
def test_the_rows_of_a_batch_are_updated_as_their_oracle_does(cluster: Cluster, rule: str) -> None:
    """The dense layer by the config's rule; of the tables the rows of the batch alone, in two shards each."""
    oracle = net(sparse=True)
    steps = [
        SPARSE[rule](oracle.words.weight),
        SPARSE[rule](oracle.bags.weight),
        torch.optim.SGD(oracle.dense.parameters(), lr=LR).step,
    ]
    given: Any = RowRule("ftrl", l1=0.01, l2=0.1, initial_accumulator=0.1) if rule == "ftrl" else rule
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(2))
    placed = compare(strategy, given, oracle, lambda: [each() for each in steps] and None)
    assert [shape for _, shape in placed.shards("words.weight")] == [(ROWS // 2, WIDTH)] * 2


@pytest.mark.parametrize(
    "fields", [{"optimizer": "adam"}, {"weight_decay": 0.1}, {"optimizer": "momentum", "max_grad_norm": 0.01}]
)
def test_without_a_rule_training_is_that_of_a_whole_table(
    strategy: ParameterServerStrategy, fields: dict[str, Any]
) -> None:
    """Adam moves rows that the batch did not have, decay shrinks them, and the norm is that of all gradients together."""
    oracle = net()
    kind: Any = torch.optim.Adam if fields.get("optimizer") == "adam" else torch.optim.SGD
    extra = {"momentum": 0.9} if fields.get("optimizer") == "momentum" else {}
    optimizer = kind(oracle.parameters(), lr=LR, weight_decay=fields.get("weight_decay", 0.0), **extra)
    compare(strategy, None, oracle, optimizer.step, **fields)


def test_only_the_rows_of_the_batch_move(cluster: Cluster) -> None:
    """No more than twice the rows' bytes, of a million rows; nothing of the table travels with the module."""
    rows, ids = 1_000_000, torch.arange(0, 960_000, 10_000)
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(2))
    coordinator = ClusterCoordinator(strategy)
    placed = strategy.place(nn.Embedding(rows, WIDTH), config(optimizer="adam"), embeddings="adagrad")

    def step(placed: PlacedModule) -> None:
        with placed.step() as model:
            model(ids).square().sum().backward()

    def moved() -> int:
        reports = [cluster.engine.plane.ask(k, "load_report") for k in range(cluster.num_ps)]
        return sum(
            found["bytes_in"] + found["bytes_out"]
            for each in reports
            for name, found in each.items()
            if name in placed.blocks()
        )

    before = moved()
    for _ in range(5):
        coordinator.schedule(step, args=(placed,))
    coordinator.join()
    assert 0 < moved() - before <= 5 * 2 * (2 * len(ids) * WIDTH * 4)
    placed.delete()
    coordinator.shutdown()


def test_a_table_that_fits_no_other_process_is_drawn_where_it_lies(cluster: Cluster) -> None:
    """Behaviour 73: made on the meta device, as `nn.Embedding` would begin: N(0, 1), and zeros for padding; the same under the same seed."""
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(2))

    def place() -> PlacedModule:
        torch.manual_seed(5)
        table = nn.Embedding(ROWS, WIDTH, padding_idx=ROWS - 1, device="meta")
        return strategy.place(nn.Sequential(table, nn.Linear(WIDTH, 1)), config(), embeddings="adagrad")

    placed, again = place(), place()
    values = placed.state_dict()["parameters"]["0.weight"]
    assert torch.equal(values, again.state_dict()["parameters"]["0.weight"])
    assert values.mean().item() == pytest.approx(0.0, abs=4 / values.numel() ** 0.5)
    assert values.std().item() == pytest.approx(1.0, abs=0.02)
    assert not values[-1].any()
    assert values[:-1].any(1).all()
    with placed.step() as model:
        model(torch.tensor([[1, 2, ROWS - 1]])).sum().backward()
    after = placed.state_dict()["parameters"]["0.weight"]
    assert (after != values).any(1).nonzero().flatten().tolist() == [1, 2]
    with pytest.raises(UsageError, match=r"'1.weight' is on the device 'meta'"):
        strategy.place(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")), config())


@contextlib.contextmanager
def little_memory(nbytes: int) -> Iterator[None]:
    """Let this process take so much more memory of its own, and no more."""
    there = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (there + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_a_table_larger_than_the_memory_of_workers_and_coordinator_trains(cluster: Cluster, engine: str) -> None:
    if engine == "threads":
        pytest.skip("its servers are in this process")
    rows, ids, more = 4_000_000, torch.arange(0, 4_000_000, 40_000), 160 * 2**20  # threads take 8 MB each
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(2))
    coordinator = ClusterCoordinator(strategy)

    def train(placed: PlacedModule) -> tuple[float, float, bool]:
        losses, fits = [], False
        with little_memory(more):
            for _ in range(3):
                with placed.step() as model:
                    loss = model(ids).square().sum()
                    loss.backward()
                losses.append(float(loss))
            with contextlib.suppress(RuntimeError, MemoryError):
                fits = bool(torch.ones(rows, WIDTH)[0, 0])
        return losses[0], losses[-1], fits

    with little_memory(more):
        placed = strategy.place(nn.Embedding(rows, WIDTH, device="meta"), config(), embeddings="adagrad")
        found = coordinator.fetch([coordinator.schedule(train, args=(placed,)) for _ in range(6)])
    assert all(last < first and not fits for first, last, fits in found)
    placed.delete()
    coordinator.shutdown()


def test_a_table_is_used_as_it_is_in_torch(strategy: ParameterServerStrategy) -> None:
    """Offsets and weights of a bag, empty batches, its weight as a tensor, ids that do not exist."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.bags = nn.Embedding(ROWS, WIDTH), nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=2)

        def forward(self, ids: Tensor) -> Tensor:
            weights = torch.linspace(0.1, 1.0, len(ids))
            bag = self.bags(ids, torch.tensor([0, 2]), per_sample_weights=weights)
            return (bag @ self.table.weight.T).tanh().sum() + self.table(ids).sum() + self.table(ids[:0]).sum()

    torch.manual_seed(0)
    oracle = Odd()
    placed = strategy.place(copy.deepcopy(oracle), config())
    ids, optimizer = torch.tensor([1, 2, 7, 7, 4999], dtype=torch.int32), torch.optim.SGD(oracle.parameters(), lr=LR)
    with placed.step() as model:
        assert (model.table.num_embeddings, isinstance(model.table, nn.Embedding)) == (ROWS, True)
        loss = model(ids)
        loss.backward()
    theirs = oracle(ids)
    theirs.backward()
    optimizer.step()
    assert loss.item() == pytest.approx(theirs.item())
    for key, value in oracle.state_dict().items():
        torch.testing.assert_close(placed.module().state_dict()[key], value)
    with pytest.raises(IndexError, match=r"Row 5000 of 'table.weight', which has rows 0 to 4999"):
        placed.pull().module.table(torch.tensor([5000]))
    tied = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False))
    tied[1].weight = tied[0].weight
    assert not strategy.place(tied, config(), embeddings="adagrad").tables, "another layer uses the parameter"
    with pytest.raises(
        UsageError, match=r"embeddings='adam' is not known. Allowed: None, 'whole', 'sgd', 'lazy_momentum'"
    ):
        strategy.place(net(), config(), embeddings="adam")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="divides by beta plus"):
        RowRule("ftrl", beta=0.0)


def test_checkpoints_fit_tables_kept_either_way(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """T14.5: whole tables and tables by rows have the same checkpoints where the slots are the same."""
    rowwise, whole = (strategy.place(net(), config(optimizer="adam"), embeddings=how) for how in (None, "whole"))
    assert (bool(rowwise.tables), bool(whole.tables)) == (True, False)
    for ids in batches(3):
        train(rowwise, ids)
    CheckpointManager(rowwise, tmp_path).save()
    CheckpointManager(whole, tmp_path).restore()
    for name, states in rowwise.state_dict()["slots"].items():
        for key, value in states.items():
            assert torch.equal(whole.state_dict()["slots"][name][key], value)
    with pytest.raises(CheckpointError, match=r"holds 'm' of other parameters .* bags.weight, words.weight"):
        CheckpointManager(strategy.place(net(), config(optimizer="adam"), embeddings="sgd"), tmp_path).restore()


def test_words_are_looked_up_in_a_variable(cluster: Cluster) -> None:
    """`table[ids]` and a bag read rows alone, with a lookup of strings in front, over shards."""
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(2))
    lookup, values = StringLookup([f"word{k}" for k in range(999)]), torch.arange(8000.0).view(1000, 8)
    table = strategy.variable(values)
    ids = torch.as_tensor(lookup(["word5", "word998", "no word", "word5"]))

    def read() -> int:
        return sum(
            found["bytes_out"]
            for k in range(2)
            for name, found in cluster.engine.plane.ask(k, "load_report").items()
            if name.startswith(table.name)
        )

    before = read()
    assert torch.equal(table[ids], values[ids])
    assert torch.equal(table[[-1, 3]], values[[-1, 3]])
    assert torch.equal(table[7], values[7])
    bags = torch.nn.functional.embedding_bag(ids.view(2, 2), table, mode="sum")
    assert torch.equal(bags, values[ids].view(2, 2, 8).sum(1))
    assert read() - before <= 2 * (4 + 2 + 1 + 4) * 8 * 4
