"""Where variables lie, how they are split, and that they are used like tensors (behaviours 68 to 76, T3)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn import functional

from workbench.errors import UsageError
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.errors import UnavailableError
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.servers.server import Place
from workbench.parameter_server.servers.variable import ShardedVariable, Variable
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.workers.worker import Call


def sharded(cluster: Cluster, value: Any, shards: int = 4) -> ShardedVariable:
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(shards))
    made = strategy.variable(value)
    assert isinstance(made, ShardedVariable)
    return made


def test_variables_take_turns(strategy: ParameterServerStrategy) -> None:
    """Behaviour 68, T3.8; a device makes no difference."""
    with strategy.scope(), torch.device("cpu"):
        made = [strategy.variable(torch.zeros(2)) for _ in range(5)]
    assert [each.server for each in made if isinstance(each, Variable)] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("rows", "shards", "expected"),
    [(10, 4, [3, 3, 2, 2]), (13, 5, [3, 3, 3, 2, 2]), (3, 5, [1, 1, 1]), (7, 1, [7]), (8, 2, [4, 4])],
)
def test_the_first_shards_take_what_is_left_over(cluster: Cluster, rows: int, shards: int, expected: list[int]) -> None:
    """Behaviour 70, T3.4, T3.9; the shards go on where the servers' turns stand."""
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(shards))
    value = torch.arange(rows * 2.0).reshape(rows, 2)
    made = strategy.variable(value)
    assert [each.shape[0] for each in made.variables] == expected
    assert [each.server for each in made.variables] == [k % 2 for k in range(len(expected))]
    assert torch.equal(made.read(), value)
    following = strategy.variable(torch.zeros(1))
    assert following.variables[0].server == len(expected) % 2


def test_the_partitioner_sees_every_variable(cluster: Cluster) -> None:
    """T3.3; behaviour 71 where it returns nonsense."""
    seen = []

    def spy(shape: Any, dtype: torch.dtype) -> list[int]:
        seen.append((tuple(shape), dtype))
        return [1] * len(shape) if len(seen) < 3 else [0]

    strategy = ParameterServerStrategy(cluster, variable_partitioner=spy)
    strategy.variable(torch.zeros(3, 2))
    strategy.variable(torch.zeros(5, dtype=torch.int64))
    assert seen == [((3, 2), torch.float32), ((5,), torch.int64)]
    with pytest.raises(UsageError, match="variable_partitioner"):
        strategy.variable(torch.zeros(4, 4))


def test_a_sharded_variable_is_used_like_a_tensor(cluster: Cluster) -> None:
    """Behaviour 74, T3.5, T3.6."""
    whole = torch.arange(20.0).reshape(10, 2)
    made = sharded(cluster, whole)
    assert (made.shape, made.dtype, len(made)) == (whole.shape, whole.dtype, 10)
    x = torch.ones(10, 2) * 3
    for ours, theirs in (
        (made + x, whole + x), (x + made, x + whole), (made - 1, whole - 1), (1 - made, 1 - whole), (made * made, whole * whole),
        (2 / (made + 1), 2 / (whole + 1)), (made @ torch.ones(2), whole @ torch.ones(2)), (x.T @ made, x.T @ whole), (-made, -whole),
        (torch.relu(made), torch.relu(whole)), (torch.cat([made, x]), torch.cat([whole, x])), (made > 4, whole > 4),  # type: ignore[list-item, operator]
    ):  # fmt: skip
        assert torch.equal(ours, theirs)
    assert made.numpy().tolist() == whole.tolist()


@pytest.mark.parametrize(
    "key",
    [3, -1, slice(2, 7), slice(None, None, 3), slice(-4, -1), (slice(1, 9, 2), 0), Ellipsis, (Ellipsis, -1), None, (slice(None), None),
     torch.arange(10) % 3 == 0, torch.tensor([7, 0, 7])],
    ids=str,
)  # fmt: skip
def test_slices_are_those_of_the_whole(cluster: Cluster, key: Any) -> None:
    """Behaviour 74."""
    whole = torch.arange(20.0).reshape(10, 2)
    assert torch.equal(sharded(cluster, whole)[key], whole[key])


def test_an_index_beyond_the_end(cluster: Cluster) -> None:
    """Behaviour 74; a shard alone says the same."""
    made = sharded(cluster, torch.zeros(10, 2))
    with pytest.raises(IndexError):
        made[10]
    for each, last in ((made, 9), (made.variables[0], 2)):
        for row in (last + 1, -1):
            with pytest.raises(IndexError, match=f"Row {row} of .*rows 0 to {last}"):
                each.gather(torch.tensor([0, row]))
        with pytest.raises(UsageError, match=r"torch.float32 values; give integer ids"):
            each.gather(torch.tensor([1.0]))
        assert each.gather(torch.tensor([])).shape == (0, 2)


@pytest.mark.parametrize("shards", [1, 4])
def test_assignments_reach_every_shard(cluster: Cluster, coordinator: ClusterCoordinator, shards: int) -> None:
    """Behaviour 74; from a worker, too."""
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(shards))
    value = torch.arange(20.0).reshape(10, 2)
    made = strategy.variable(torch.zeros(10, 2))

    def work() -> None:
        made.assign(value)
        made.assign_add(torch.ones(10, 2))
        made.assign_sub(3.0)

    coordinator.schedule(work)
    coordinator.join()
    assert torch.equal(made.read(), value - 2)
    with pytest.raises(UsageError, match=r"shape \(3, 2\) was given to variable .* of shape \(10, 2\)"):
        made.assign(torch.zeros(3, 2))


def requests(made: ShardedVariable | Variable, cluster: Cluster) -> list[tuple[int, int]]:
    found = []
    for each in made.variables:
        row = cluster.engine.plane.ask(each.place.server, "load_report")[each.place.block]
        found.append((row["requests"], row["bytes_out"] + row["bytes_in"]))
    return found


def test_a_lookup_moves_its_rows_alone(cluster: Cluster) -> None:
    """Behaviour 75, T3.7: one request for each shard that holds some of them, and twice the rows' bytes at most."""
    whole = torch.arange(4000.0).reshape(1000, 4)
    made = sharded(cluster, whole)
    ids = torch.tensor([[0, 999, 500], [1, 0, 251]])
    before = requests(made, cluster)
    found = functional.embedding(ids, made)  # type: ignore[arg-type]
    after = requests(made, cluster)
    assert torch.equal(found, functional.embedding(ids, whole))
    assert [b[0] - a[0] for a, b in zip(before, after, strict=True)] == [1, 1, 1, 1]
    moved = sum(b[1] - a[1] for a, b in zip(before, after, strict=True))
    assert 0 < moved <= 2 * 6 * 4 * 4, "6 rows of 4 float32"
    functional.embedding(torch.tensor([1, 2]), made)  # type: ignore[arg-type]
    assert [b[0] - a[0] for a, b in zip(after, requests(made, cluster), strict=True)] == [1, 0, 0, 0]


def test_a_lookup_with_more_to_it_is_that_of_the_whole(cluster: Cluster) -> None:
    """Behaviour 75: where rows are shortened, too."""
    whole, ids = torch.arange(20.0).reshape(10, 2), torch.tensor([[1, 9], [0, 3]])
    made: Any = sharded(cluster, whole)
    expected = functional.embedding(ids, whole.clone(), max_norm=2.0)
    assert expected.norm(dim=-1).max() <= 2.0 + 1e-5
    torch.testing.assert_close(functional.embedding(ids, made, max_norm=2.0), expected)
    torch.testing.assert_close(functional.embedding(ids, made, padding_idx=1), whole[ids])
    torch.testing.assert_close(functional.embedding_bag(ids, made), whole[ids].mean(1))


def shard(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Variable:
    return Variable("v", shape, dtype, Place(0, "v"), "none")


@pytest.mark.parametrize(
    ("shards", "match"),
    [
        ([], r"at least one; given: list\. strategy\.variable makes them"),
        ([torch.zeros(2)], "takes a list of Variables.* given: a Tensor among them"),
        (shard((2, 2)), "takes a list of Variables.* given: Variable"),
        ([shard((2, 2)), shard((2, 2), torch.float64)], "differ in dtype"),
        ([shard((2, 2)), shard((2, 3))], "first axis alone"),
        ([shard(()), shard(())], r"have no axis: .* view\(1\)"),
    ],
)
def test_shards_that_do_not_fit_together(shards: Any, match: str) -> None:
    """Behaviour 76."""
    with pytest.raises(UsageError, match=match):
        ShardedVariable(shards, "v")


def test_a_variable_says_where_it_lies_and_outlives_its_cluster_with_words(own_cluster: Any) -> None:
    cluster = own_cluster(1, 2)
    made = sharded(cluster, torch.zeros(7, 2), shards=2)
    assert "4 rows on ps 0, 3 rows on ps 1" in repr(made)
    cluster.shutdown()
    with pytest.raises(UsageError, match="was shut down"):
        made.read()
    with pytest.raises(UnavailableError, match="shut down"):
        cluster.engine.execute(0, [Call(int)], threading.Event())
