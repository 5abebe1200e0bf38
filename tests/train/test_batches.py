"""The stream of batches: every example once an epoch, the same order for the same seed, and resumable anywhere."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

from tests.helpers.workloads import small_workload
from workbench.errors import DataError, DeviceError
from workbench.parameter_server.data.feed import IndexedBatches
from workbench.train import batches
from workbench.train.batches import DataStream, eval_batches, resolve_device, to_device, train_batches, train_order
from workbench.train.distributed.data_parallel import evaluate_shard
from workbench.train.stacked_weights import build_model
from workbench.workloads.subsets import periodic_subset

CPU = torch.device("cpu")


class Items(Dataset[Any]):
    def __init__(self, count: int = 20, *, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise ValueError("planted\nin two lines")
        return torch.tensor(index)


class Stream(IterableDataset[Any]):
    """Yields 0, 1, ...; with `dealt`, deals them out among the worker processes itself, as iterable datasets may."""

    def __init__(self, yields: int = 20, *, dealt: bool = False, fails_at: int | None = None) -> None:
        self.yields, self.dealt, self.fails_at = yields, dealt, fails_at

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info() if self.dealt else None
        for i in range(self.yields) if info is None else range(info.id, self.yields, info.num_workers):
            if i == self.fails_at:
                raise ValueError("planted\nin two lines")
            yield torch.tensor(i)


def flat(batch: Any) -> list[int]:
    return [int(v) for v in (batch[0] if isinstance(batch, (list, tuple)) else batch)]


def read(data: Any, *, first: int = 0, steps: int = 12, num_workers: int = 0, **config: Any) -> list[list[int]]:
    """The examples of every step, micro-batches together."""
    workload = small_workload(train_data=data, num_workers=num_workers, config=config)
    chosen = itertools.islice(train_batches(workload, workload.config, CPU, start_step=first), steps)
    return [[v for batch, _ in chunk for v in flat(batch)] for chunk in chosen]


def stream(kind: str, count: int = 20, **how: Any) -> list[list[int]]:
    return read(TensorDataset(torch.arange(count)) if kind == "tensors" else Items(count), **how)


@pytest.mark.parametrize("kind", ["tensors", "items"])
@pytest.mark.parametrize(("count", "batch_size"), [(20, 5), (23, 5), (7, 4), (5, 5), (6, 1)])
def test_an_epoch_repeats_nothing_and_leaves_out_less_than_a_batch(kind: str, count: int, batch_size: int) -> None:
    per_epoch = count // batch_size
    steps = stream(kind, count, steps=10 * per_epoch, batch_size=batch_size)
    epochs = [list(itertools.chain(*steps[e * per_epoch : (e + 1) * per_epoch])) for e in range(10)]
    assert all(len(seen) == len(set(seen)) == per_epoch * batch_size for seen in epochs)
    if count == batch_size:
        assert epochs[0] == epochs[1] == list(range(count)), "the full batch is always in order"
    elif count == 23:
        assert len({frozenset(seen) for seen in epochs}) > 5, "what is left out differs"


@pytest.mark.parametrize("first", [1, 3, 4, 7])
@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_a_stream_can_begin_at_any_step_and_is_the_same_for_items(first: int, accumulate_steps: int) -> None:
    whole = stream("tensors", batch_size=6)
    for kind in ("tensors", "items"):
        how: Any = {"batch_size": 6, "accumulate_steps": accumulate_steps}
        assert stream(kind, **how) == whole, "micro-batches are the batch in pieces"
        assert stream(kind, first=first, steps=12 - first, **how) == whole[first:]
    assert read(Items(), first=first, steps=12 - first, num_workers=2, batch_size=6) == whole[first:]
    order = train_order(20, small_workload(config={"batch_size": 6}).config, start_step=first)
    assert list(itertools.islice(order, 12 - first)) == whole[first:]


def test_the_seed_decides_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    base = stream("tensors", batch_size=5)
    torch.manual_seed(99)
    assert stream("tensors", batch_size=5, shared_seed=4) == base
    assert stream("tensors", batch_size=5, per_host_seed=1) != base
    monkeypatch.setattr(batches, "GATHER_BYTES", 1)
    assert stream("tensors", batch_size=5) == base, "how many are gathered at once is no part of the order"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dealt", [False, True])
def test_an_epoch_of_iterable_data_repeats_nothing(num_workers: int, dealt: bool) -> None:
    before = torch.get_rng_state()
    for first in (0, 2):
        seen = read(Stream(dealt=dealt), first=first, steps=8, num_workers=num_workers, batch_size=5)
        assert list(itertools.chain(*seen)) == (list(range(20)) * 3)[5 * first : 5 * first + 40]
    assert torch.equal(torch.get_rng_state(), before), "or a resumed run would draw other dropout masks"


@pytest.mark.parametrize(
    ("count", "said"), [(16, "yields 16"), (0, "yields 0"), (19, "yields 19"), (21, "yields more than 20")]
)
def test_a_split_in_its_own_order_is_evaluated_whole_or_not_at_all(count: int, said: str) -> None:
    def seen(data: Any) -> list[Any]:
        return list(eval_batches(small_workload(validation_data=data), "validation", 4, CPU, None))

    assert sum(examples for _, examples in seen(Stream())) == 20
    with pytest.raises(DataError, match=rf"validation split \(Stream.*{said} examples, though its length is 20"):
        seen(Stream(count))
    if count < 6:
        with pytest.raises(DataError, match=r"yields fewer than one batch of 6 examples, though its length is 20"):
            read(Stream(count), batch_size=6)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(("data", "said"), [
    (Items(fails_at=13), "item 13 of the {} split (Items, 20 examples) raised ValueError: planted"),
    (Stream(fails_at=13), "item 13 of the {} split (Stream, in its own order)"),
])  # fmt: skip
def test_an_item_that_raises_is_told_in_our_words_alone(data: Any, said: str, split: str, num_workers: int) -> None:
    workload = small_workload(**{f"{split}_data": data}, num_workers=num_workers, config={"batch_size": 4})
    found = train_batches(workload, workload.config, CPU) if split == "train" else eval_batches(workload, split, 4, CPU, None)  # fmt: skip
    with pytest.raises(DataError) as caught:
        list(itertools.islice(found, 10))
    assert str(caught.value).startswith(said.format(split))
    if split == "train" or isinstance(data, Items):
        assert ("Traceback" in str(caught.value.__cause__)) == (num_workers > 0), "where it was is kept"


@pytest.mark.parametrize("batch_size", [1, 4, 20, 50])
@pytest.mark.parametrize("kind", ["tensors", "items"])
def test_evaluation_sees_every_example_once_in_order(kind: str, batch_size: int) -> None:
    data = TensorDataset(torch.arange(20)) if kind == "tensors" else Items()
    found = list(eval_batches(small_workload(validation_data=data), "validation", batch_size, CPU, None))
    assert [v for batch, _ in found for v in flat(batch)] == list(range(20))
    assert [examples for _, examples in found] == [len(flat(batch)) for batch, _ in found]


class Noisy(Items):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def test_what_a_stream_draws_is_its_own_and_peeking_takes_nothing() -> None:
    """P7.6: it depends on the per-host seed and the rank, and goes on from its state."""
    workload = small_workload(train_data=Noisy(), config={"batch_size": 4})

    def drawn(made: DataStream, count: int) -> list[float]:
        return [float(v) for _ in range(count) for ((batch, _),) in [made.next()] for v in batch.flatten()]

    made, before = DataStream(workload, workload.config, CPU), torch.get_rng_state()
    peeked = made.peek(2)
    first = drawn(made, 3)
    assert [float(v) for ((batch, _),) in peeked for v in batch.flatten()] == first[:8]
    state = made.state()
    onward = drawn(made, 2)
    assert drawn(DataStream(workload, workload.config, CPU, start_step=3, state=state), 2) == onward
    assert torch.equal(torch.get_rng_state(), before)
    others = [DataStream(workload, workload.config.replace(per_host_seed=1), CPU), DataStream(workload, workload.config, CPU, rank=1, hosts=2)]  # fmt: skip
    assert len({first[0], *(drawn(other, 1)[0] for other in others)}) == 3


@pytest.mark.parametrize(
    ("device", "said"), [("gpu", "'gpu' is not known"), ("cuda:99", "sees .* CUDA devices"), ("mps", "has none here")]
)
def test_a_device_that_is_not_here_is_named(device: str, said: str) -> None:
    with pytest.raises(DeviceError, match=rf"device='{device}' .*{said}|device={said}"):
        resolve_device(device)


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_every_tensor_of_a_nested_batch_is_moved_and_cast() -> None:
    batch = {"pair": Pair(torch.ones(2), "a"), "list": [torch.ones(1, dtype=torch.int64), (torch.zeros(1), None, 3)]}
    moved = to_device(batch, CPU, torch.float64)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].x.dtype == torch.float64
    assert moved["pair"].name == "a"
    assert moved["list"][0].dtype == torch.int64, "classes and tokens stay integers"
    assert moved["list"][1][0].dtype == torch.float64
    assert moved["list"][1][1:] == (None, 3)
    assert to_device(batch["pair"].x, CPU) is batch["pair"].x


class Augmented(TensorDataset):
    """Returns other rows than its tensors hold: the sign of the label is turned."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x, -y


class TurnedSubset(Subset[Any]):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(x, -y) for x, y in super().__getitems__(indices)]


@pytest.mark.parametrize("kind", ["augmented", "random_split", "subset", "concatenated"])
def test_what_is_trained_and_evaluated_is_what_a_loader_gives(kind: str) -> None:
    x, y = torch.randn(48, 3), torch.ones(48)
    turned = Augmented(x, y)
    data: Any = {
        "augmented": turned, "random_split": random_split(turned, [45, 3])[0], "subset": TurnedSubset(TensorDataset(x, y), range(48)),
        "concatenated": ConcatDataset([Augmented(x[:20], y[:20]), TensorDataset(x[20:], -y[20:])]),
    }[kind]  # fmt: skip
    given = small_workload(train_data=data, validation_data=data, config={"batch_size": 8})
    trained = itertools.chain(*itertools.islice(train_batches(given, given.config, CPU), 6))
    evaluated = eval_batches(given, "validation", 7, CPU, None)
    assert all(bool((batch[1] == -1).all()) for batch, _ in itertools.chain(trained, evaluated))
    part = periodic_subset(given, 5).validation_data
    assert next(iter(DataLoader(part, batch_size=5)))[1].tolist() == [-1.0] * 5
    if kind == "augmented":
        model = build_model(given, given.config, CPU).eval()
        ((inputs, targets),) = [(a.double(), b.double()) for a, b in DataLoader(data, batch_size=48)]
        with torch.no_grad():
            expected = float(((model(inputs).squeeze(-1) - targets) ** 2).mean())
        assert [float(v) for v in IndexedBatches(data).take([0, 1])[1]] == [-1.0, -1.0]
        shard = evaluate_shard(given, model, 0, 1, batch_size=7, precision="float64")
        assert shard[0].total / shard[0].weight == pytest.approx(expected, rel=1e-9)
