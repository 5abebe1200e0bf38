"""What fit, evaluate and predict take for data, and who reads what of it (T7, T14.11, behaviours 80, 85, 87)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.helpers.datasets import Items, Stream
from tests.helpers.workloads import small_workload
from workbench.errors import DataError, UsageError
from workbench.parameter_server.context import WorkerContext, get_current_worker_index, on_worker
from workbench.parameter_server.data import feed as batch_sources
from workbench.parameter_server.data.datasets import DatasetCreator, DatasetRecipe
from workbench.parameter_server.data.feed import Batching, as_data, evaluation_feed, training_feed
from workbench.parameter_server.errors import OutOfRangeError
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.steps import AdditiveMetric
from workbench.parameter_server.training.strategy_model import StrategyModel

X = torch.arange(24.0, dtype=torch.float64)[:, None].expand(24, 3).contiguous()
Y = torch.sin(X.sum(1))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield X[0], Y[0]


def batches() -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(8), Y.split(8), strict=True))


def visited(outputs: Any, batch: Any, weights: Tensor) -> Tensor:
    return torch.bincount(batch[0][:, 0].round().long(), minlength=24)


def spread(counts: Tensor) -> float:
    return float(counts.min()) if counts.min() == counts.max() else float("nan")


VISITS = {"visits": AdditiveMetric(visited, spread)}

KNOWN = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "TensorDataset": lambda: TensorDataset(X, Y),
    "dataset": lambda: Items(X, Y),
    "list": lambda: [Items(X, Y)[k] for k in range(24)],
    "loader": lambda: DataLoader(Items(X, Y), batch_size=8, shuffle=True),
}
STREAMS = {
    "stream": lambda: Stream(X, Y),
    "loader of a stream": lambda: DataLoader(Stream(X, Y), batch_size=8),
}
MADE = {
    "creator": lambda: DatasetCreator(lambda context: batches()),
    "function of a context": lambda: lambda context: DataLoader(Items(X, Y), batch_size=8, shuffle=True),
    "function": lambda: lambda: TensorDataset(X, Y),
    "function of a stream": lambda: lambda: Stream(X, Y),
}


def workload() -> Any:
    return small_workload(train_data=TensorDataset(X, Y), validation_data=TensorDataset(X, Y), metrics={})


@pytest.fixture(params=[True, False], ids=["local", "cluster"])
def chosen(request: pytest.FixtureRequest, strategy: ParameterServerStrategy) -> ParameterServerStrategy | None:
    return None if request.param else strategy


@pytest.mark.parametrize("kind", [*KNOWN, *STREAMS])
def test_data_with_a_length_needs_no_number_of_steps(chosen: ParameterServerStrategy | None, kind: str) -> None:
    """T14.8, T14.11, behaviour 80; what has indices is read once an epoch by all workers together."""
    model = StrategyModel(workload(), chosen, metrics=VISITS)
    history = model.fit({**KNOWN, **STREAMS}[kind](), epochs=2, verbose=0)
    assert model.steps == 6
    if kind in KNOWN or chosen is None:
        assert history.history["visits"] == [1.0, 1.0]


@pytest.mark.parametrize("kind", MADE)
def test_what_a_function_makes_is_repeated(chosen: ParameterServerStrategy | None, kind: str) -> None:
    """T7.5, T14.11: three batches, and ten steps."""
    model = StrategyModel(workload(), chosen, metrics=VISITS)
    model.fit(MADE[kind](), epochs=1, steps_per_epoch=10, verbose=0)
    assert model.steps == 10
    if chosen is None:
        assert model.fit(MADE[kind](), steps_per_epoch=3, verbose=0).history["visits"] == [1.0]


def test_a_stream_is_shared_out_batch_by_batch(strategy: ParameterServerStrategy) -> None:
    """Of three workers each takes every third batch, so that no two read the same."""
    source = training_feed(as_data(DataLoader(Stream(X, Y), batch_size=8)), workload().config, None, num_workers=3)
    model = StrategyModel(workload(), strategy)
    held = model.executor.hold(source.make)
    found = {result for _, result in model.executor.completed([(first_of, (held,))] * 30)}
    assert found == {(0, 0.0), (1, 8.0), (2, 16.0)}


def first_of(source: Any) -> tuple[int, float]:
    time.sleep(0.01)  # so that each worker gets some
    return get_current_worker_index(), float(source.take(None)[0][0, 0])


def test_a_generator_ends_and_says_what_to_do(strategy: ParameterServerStrategy) -> None:
    """T7.5: what cannot be begun anew is an error that names the remedy."""

    def once() -> Iterator[Any]:
        yield from batches()

    with pytest.raises(OutOfRangeError, match="ended after 3 batches. Repeat it endlessly"):
        StrategyModel(workload(), strategy).fit(once, steps_per_epoch=30, verbose=0)
    with pytest.raises(DataError, match="has no batch"):
        StrategyModel(workload(), strategy).fit(lambda: [], steps_per_epoch=3, verbose=0)


@pytest.mark.parametrize("kind", [*KNOWN, *STREAMS, "function", "function of a stream", "sharded"])
def test_evaluation_of_every_kind_counts_each_example_once(chosen: ParameterServerStrategy | None, kind: str) -> None:
    """Behaviours 85, 86, T14.14: loaders that shuffle, too."""

    def sharded(context: Any) -> Any:
        rows = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        return TensorDataset(X[rows], Y[rows])

    data = DatasetCreator(sharded) if kind == "sharded" else {**KNOWN, **STREAMS, **MADE}[kind]()
    model = StrategyModel(workload(), chosen, metrics=VISITS)
    found = model.evaluate(data, batch_size=8)
    assert found["visits"] == 1.0
    direct = ((model.module()(X).squeeze(-1) - Y) ** 2).mean()
    assert found["loss"] == pytest.approx(float(direct.detach()), rel=1e-12)


@pytest.mark.parametrize("endless", [Endless, lambda: Endless, lambda: DatasetCreator(lambda context: Endless())])
def test_an_endless_dataset_is_refused(chosen: ParameterServerStrategy | None, endless: Any) -> None:
    """Behaviour 87; a number of steps makes it possible (T8.4)."""
    model = StrategyModel(workload(), chosen)
    with pytest.raises(UsageError, match="may be endless. Leave out its repeat"):
        model.evaluate(endless())
    assert model.evaluate(endless(), steps=4)["loss"] >= 0
    assert model.evaluate(endless(), steps=4, where="coordinator")["loss"] >= 0


def test_prediction_keeps_the_order(chosen: ParameterServerStrategy | None) -> None:
    """Behaviour 85: same rows, same outputs, whatever the batches and whoever computes them."""
    model = StrategyModel(workload(), chosen)
    model.fit(verbose=0)
    expected = model.module()(X).detach()
    for data in (X, X.numpy(), TensorDataset(X, Y), DataLoader(Items(X, Y), batch_size=5)):
        for size in (1, 7, 100):
            torch.testing.assert_close(model.predict(data, batch_size=size), expected)
    torch.testing.assert_close(model.predict(X, where="coordinator"), expected)
    nested = workload().replace(forward=lambda model, batch: {"a": model(batch[0]), "b": [batch[0][:, 0]]})
    found = StrategyModel(nested, chosen).predict(X, batch_size=5)
    assert torch.equal(found["b"][0], X[:, 0])
    assert found["a"].shape == (24, 1)
    odd = workload().replace(forward=lambda model, batch: "text")
    with pytest.raises(UsageError, match="returned str"):
        StrategyModel(odd, chosen).predict(X)


def test_the_order_of_an_epoch_is_the_trainers_and_goes_on_where_it_stopped() -> None:
    """T4.9: a run that is resumed sees the batches that it would have seen."""
    config = workload().config
    feed = training_feed(TensorDataset(X, Y), config, None, num_workers=2)
    whole, later = feed.plans(0), feed.plans(5)
    first = [next(whole) for _ in range(9)]
    assert [next(later) for _ in range(4)] == first[5:]
    for epoch in range(3):
        assert sorted(index for batch in first[3 * epoch : 3 * epoch + 3] for index in batch) == list(range(24))
    assert first[:3] != first[3:6]


def test_a_loader_goes_on_at_the_batch_where_it_stopped() -> None:
    """T4.9: where it does not shuffle, that is the batch that would have come."""
    feed = training_feed(DataLoader(TensorDataset(X, Y), batch_size=5), workload().config, None, num_workers=2)
    assert feed.steps_per_epoch == 5
    whole, later = feed.plans(0), feed.plans(7)
    first = [next(whole) for _ in range(12)]
    assert [next(later) for _ in range(5)] == first[7:]
    assert first[:5] == [list(range(at, min(at + 5, 24))) for at in range(0, 24, 5)]


def drawn(worker: int, source: Any, batching: Batching, share: int | None, count: int) -> list[Any]:
    with on_worker(WorkerContext(worker)):
        stream = batch_sources.Stream(DatasetRecipe(source), batching, share)
        return [stream.take(None) for _ in range(count)]


def test_workers_shuffle_apart_and_drop_what_fills_no_batch() -> None:
    """T7.4: the same examples in another order on each worker, anew in each pass; an evaluation keeps order and rest."""
    training, evaluation = Batching(10, None, 3), Batching(10, None, None)
    orders = [
        [int(x) for (batch,) in drawn(k, TensorDataset(torch.arange(24)), training, None, 4) for x in batch]
        for k in range(3)
    ]
    assert len({tuple(order) for order in orders}) == 3
    for order in orders:
        assert len(set(order[:20])) == len(set(order[20:])) == 20
        assert order[:20] != order[20:]
    kept = [batch[0].tolist() for batch in evaluation(TensorDataset(torch.arange(24)))]
    assert kept == [list(range(10)), list(range(10, 20)), list(range(20, 24))]


def test_a_stream_of_fewer_batches_than_workers_is_read_by_all() -> None:
    """Nobody waits for a batch that never comes."""
    batches = ["a", "b"]
    found = [drawn(worker, batches, Batching(1, None, 0), 3, 4) for worker in range(3)]
    assert found == [["a"] * 4, ["b"] * 4, ["a", "b"] * 2]


def test_shards_are_even_and_hold_everything() -> None:
    """Behaviour 86: 5 shards a worker unless they are counted; never an empty one."""
    for examples, size, shards, expected in ((24, 1, None, 10), (24, 8, None, 3), (24, 5, 2, 2)):
        feed = evaluation_feed(TensorDataset(X[:examples]), size, None, num_workers=2, shards=shards, steps=None)
        plans = list(feed.plans(0))
        assert len(plans) == expected
        assert [index for plan in plans for batch in plan for index in batch] == list(range(examples))
        lengths = {len(plan) for plan in plans}
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: m.fit(X, Y[1:]), r"\[24, 23\] examples"),
        (lambda m: m.fit(Items(X, Y), Y), "y= goes with x"),
        (lambda m: m.fit(X.tolist(), Y.tolist()), r"list and list\. Make arrays of them"),
        (lambda m: m.fit({"x": X, "y": Y}), r"dict with the keys \['x', 'y'\]; its columns .* whose items are dicts"),
        (lambda m: m.fit(pd.DataFrame(X.numpy())), r"a DataFrame, whose items are columns .*to_numpy\(\)"),
        (lambda m: m.fit(3), "data=3 is no data"),
        (lambda m: m.evaluate(iter(batches())), "iterator that is under way"),
        (lambda m: m.evaluate([]), "no examples"),
        (lambda m: m.evaluate(X, Y, batch_size=8, steps=4), "steps=4 is more than the 3 batches"),
        (lambda m: m.evaluate(where="moon"), "where='moon'"),
        (lambda m: m.evaluate(shards=0), "shards=0"),
    ],
)
def test_bad_data(call: Any, says: str) -> None:
    with pytest.raises((UsageError, DataError), match=says):
        call(StrategyModel(workload()))
    assert as_data(np.zeros((2, 3)), np.zeros(2)).tensors[0].dtype == torch.get_default_dtype()
