"""The stream of batches: every example once an epoch, the same order for the same seed, and resumable anywhere."""

from __future__ import annotations

import itertools
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

from tests.helpers.workloads import small_workload
from workbench.errors import DataError
from workbench.parameter_server.data.feed import IndexedBatches
from workbench.train import batches
from workbench.train.batches import eval_batches, to_device, train_batches
from workbench.train.distributed.data_parallel import evaluate_shard
from workbench.train.lane_stack import build_model
from workbench.train.trainer import Trainer
from workbench.workloads.subsets import periodic_subset

CPU = torch.device("cpu")


class Items(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Liar(IterableDataset[Any]):
    """Says that it has 20 examples and yields 3."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        return (torch.tensor(i) for i in range(3))


def stream(kind: str, count: int, *, first: int = 0, steps: int = 12, **config: Any) -> list[list[int]]:
    data = TensorDataset(torch.arange(count)) if kind == "tensors" else Items(count)
    workload = small_workload(train_data=data, config=config)
    chosen = itertools.islice(train_batches(workload, workload.config, CPU, start_step=first), steps)
    return [[int(v) for batch, _ in chunk for v in _flat(batch)] for chunk in chosen]


def _flat(batch: Any) -> list[int]:
    tensor = batch[0] if isinstance(batch, (list, tuple)) else batch
    return [int(v) for v in tensor]


@pytest.mark.parametrize("kind", ["tensors", "items"])
@pytest.mark.parametrize(("count", "batch_size"), [(20, 5), (23, 5), (7, 4), (5, 5), (6, 1)])
def test_an_epoch_repeats_nothing_and_leaves_out_less_than_a_batch(kind: str, count: int, batch_size: int) -> None:
    per_epoch = count // batch_size
    steps = stream(kind, count, steps=3 * per_epoch, batch_size=batch_size)
    for epoch in range(3):
        seen = list(itertools.chain(*steps[epoch * per_epoch : (epoch + 1) * per_epoch]))
        assert len(seen) == len(set(seen)) == per_epoch * batch_size
    assert {len(step) for step in steps} == {batch_size}


def test_what_is_left_out_differs_from_epoch_to_epoch() -> None:
    steps = stream("tensors", 23, steps=40, batch_size=5)
    missed = [set(range(23)) - set(itertools.chain(*steps[e * 4 : e * 4 + 4])) for e in range(10)]
    assert len({frozenset(m) for m in missed}) > 5
    assert set.union(*missed) != missed[0]


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_tensors_and_items_come_in_the_same_order(accumulate_steps: int) -> None:
    config = {"batch_size": 6, "accumulate_steps": accumulate_steps}
    assert stream("tensors", 20, **config) == stream("items", 20, **config)


@pytest.mark.parametrize("kind", ["tensors", "items"])
@pytest.mark.parametrize("first", [1, 3, 4, 7])
@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_a_stream_can_begin_at_any_step(kind: str, first: int, accumulate_steps: int) -> None:
    config = {"batch_size": 6, "accumulate_steps": accumulate_steps}
    whole = stream(kind, 20, **config)
    assert stream(kind, 20, first=first, steps=12 - first, **config) == whole[first:]


def test_micro_batches_are_the_batch_in_pieces() -> None:
    whole = stream("tensors", 20, batch_size=6)
    workload = small_workload(
        train_data=TensorDataset(torch.arange(20)), config={"batch_size": 6, "accumulate_steps": 3}
    )
    chunk = next(train_batches(workload, workload.config, CPU))
    assert [examples for _, examples in chunk] == [2, 2, 2]
    assert [v for batch, _ in chunk for v in _flat(batch)] == whole[0]


def test_the_seed_decides_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    base = stream("tensors", 20, batch_size=5)
    torch.manual_seed(99)
    assert stream("tensors", 20, batch_size=5, shared_seed=4) == base
    assert stream("tensors", 20, batch_size=5, per_host_seed=1) != base
    monkeypatch.setattr(batches, "GATHER_BYTES", 1)
    assert stream("tensors", 20, batch_size=5) == base, "how many are gathered at once is no part of the order"


def test_every_example_is_as_likely_at_every_place() -> None:
    """Chi-squared of who comes first over 600 epochs, against a uniform shuffle: 19 degrees of freedom."""
    firsts = [stream("tensors", 20, steps=1, batch_size=19, per_host_seed=s)[0][0] for s in range(600)]
    counts = np.bincount(firsts, minlength=20)
    assert ((counts - 30) ** 2 / 30).sum() < 50


def test_the_full_batch_is_always_in_order() -> None:
    assert stream("tensors", 8, steps=3, batch_size=8) == [list(range(8))] * 3


def test_an_iterable_that_promises_too_much_is_named() -> None:
    workload = small_workload(train_data=Liar(), config={"batch_size": 6})
    with pytest.raises(DataError, match=r"yields fewer than one batch of 6 examples, though its length is 20"):
        next(train_batches(workload, workload.config, CPU))


class Stream(IterableDataset[Any]):
    """Yields 0 ... 19; with `dealt`, deals them out among the worker processes itself, as iterable datasets may."""

    def __init__(self, *, dealt: bool = False, fails_at: int | None = None) -> None:
        self.dealt, self.fails_at = dealt, fails_at

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info() if self.dealt else None
        for i in range(20) if info is None else range(info.id, 20, info.num_workers):
            if i == self.fails_at:
                raise ValueError("planted")
            yield torch.tensor(i)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("dealt", [False, True])
def test_an_epoch_of_iterable_data_repeats_nothing(num_workers: int, dealt: bool) -> None:
    workload = small_workload(train_data=Stream(dealt=dealt), num_workers=num_workers, config={"batch_size": 5})
    for first in (0, 2):
        chosen = itertools.islice(train_batches(workload, workload.config, CPU, start_step=first), 8)
        seen = [v for ((batch, _),) in chosen for v in _flat(batch)]
        assert seen == (list(range(20)) * 3)[5 * first : 5 * first + 40]


class Counts(Stream):
    """Says that it has 20 items, and yields another number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter([torch.tensor(float(i)) for i in range(self.count)])


@pytest.mark.parametrize(("count", "said"), [(16, "yields 16"), (0, "yields 0"), (19, "yields 19"), (21, "yields more than 20"), (24, "yields more than 20")])  # fmt: skip
def test_a_split_in_its_own_order_is_evaluated_whole_or_not_at_all(count: int, said: str) -> None:
    def seen(data: Any) -> list[Any]:
        return list(eval_batches(small_workload(validation_data=data), "validation", 4, CPU, None))

    assert sum(examples for _, examples in seen(Counts(20))) == 20
    with pytest.raises(DataError, match=rf"validation split \(Counts.*{said} examples, though its length is 20"):
        seen(Counts(count))


def test_iterable_data_leaves_the_global_random_state_alone() -> None:
    workload = small_workload(train_data=Stream(), config={"batch_size": 5})
    before = torch.get_rng_state()
    list(itertools.islice(train_batches(workload, workload.config, CPU), 9))
    assert torch.equal(torch.get_rng_state(), before), "or a resumed run would draw other dropout masks"


class Fails(Items):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 77:
            raise ValueError("planted\nin two lines")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_item_that_raises_is_told_in_our_words_alone(num_workers: int, split: str) -> None:
    workload = small_workload(**{f"{split}_data": Fails(80)}, num_workers=num_workers)
    found = (
        train_batches(workload, workload.config, CPU)
        if split == "train"
        else eval_batches(workload, split, 8, CPU, None)
    )
    with pytest.raises(DataError) as caught:
        list(itertools.islice(found, 10))
    assert str(caught.value).startswith(f"item 77 of the {split} split (Fails, 80 examples) raised ValueError: planted")
    assert str(caught.value).endswith(f"{split}_data[77].")
    assert ("Traceback" in str(caught.value.__cause__)) == (num_workers > 0), "where it was is kept"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_item_of_iterable_data_that_raises_is_counted(num_workers: int) -> None:
    data = Stream(fails_at=13)
    workload = small_workload(train_data=data, validation_data=data, num_workers=num_workers, config={"batch_size": 4})
    for split in ("train", "validation"):
        found = (
            train_batches(workload, workload.config, CPU)
            if split == "train"
            else eval_batches(workload, split, 4, CPU, None)
        )
        with pytest.raises(
            DataError, match=rf"^item 13 of the {split} split \(Stream, in its own order\) .*: planted\."
        ):
            list(itertools.islice(found, 10))


@pytest.mark.parametrize("batch_size", [1, 4, 20, 50])
@pytest.mark.parametrize("kind", ["tensors", "items"])
def test_evaluation_sees_every_example_once_in_order(kind: str, batch_size: int) -> None:
    data = TensorDataset(torch.arange(20)) if kind == "tensors" else Items(20)
    found = list(eval_batches(small_workload(validation_data=data), "validation", batch_size, CPU, None))
    assert [v for batch, _ in found for v in _flat(batch)] == list(range(20))
    assert [examples for _, examples in found] == [len(_flat(batch)) for batch, _ in found]


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


class Read(UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers return it."""

    @property
    def x(self) -> torch.Tensor:
        return self.data["x"]


class Graph:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


def test_a_batch_keeps_its_type_and_moves_itself_where_it_can() -> None:
    moved = to_device(Read(x=torch.ones(2)), CPU, torch.float64)
    assert isinstance(moved, Read)
    assert moved.x.dtype == torch.float64
    meta = torch.device("meta")
    assert to_device([Graph(torch.ones(2))], meta)[0].x.device == meta
    packed = to_device(pack_padded_sequence(torch.ones(3, 2), torch.tensor([3, 1])), CPU, torch.float64)
    assert packed.data.dtype == torch.float64
    assert packed.batch_sizes.tolist() == [2, 1, 1]


class Augmented(TensorDataset):
    """Returns other rows than its tensors hold: the sign of the label is turned."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x, -y


class TurnedSubset(Subset[Any]):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(x, -y) for x, y in super().__getitems__(indices)]


def _parts(kind: str, x: torch.Tensor, y: torch.Tensor) -> Any:
    data = Augmented(x, y)
    if kind == "random_split":
        return random_split(data, [len(x) - 3, 3])[0]
    if kind == "concatenated":
        return ConcatDataset([Augmented(x[:20], y[:20]), TensorDataset(x[20:], -y[20:])])
    return TurnedSubset(TensorDataset(x, y), range(len(x))) if kind == "subset" else data


@pytest.mark.parametrize("kind", ["augmented", "random_split", "subset", "concatenated"])
def test_what_is_trained_and_evaluated_is_what_a_loader_gives(kind: str, tmp_path: Any) -> None:
    x, y = torch.randn(48, 3), torch.ones(48)
    data = _parts(kind, x, y)
    trained = small_workload(train_data=data, validation_data=data, config={"batch_size": 8, "total_steps": 2})
    for batch, _ in itertools.chain(*itertools.islice(train_batches(trained, trained.config, CPU), 6)):
        assert bool((batch[1] == -1).all())
    record = Trainer(device="cpu").run(trained, out=tmp_path / "trial")
    model = build_model(trained, trained.config, CPU).eval()
    loader = DataLoader(data, batch_size=len(data))
    with torch.no_grad():
        ((inputs, targets),) = [(a.double(), b.double()) for a, b in loader]
        expected = float(((model(inputs).squeeze(-1) - targets) ** 2).mean())
    rows = record.evals
    first = rows[(rows["step"] == 0) & (rows["metric"] == "loss")]["value"]
    assert first.tolist() == pytest.approx([expected], rel=1e-9)
    part = periodic_subset(trained, 5).validation_data
    assert next(iter(DataLoader(part, batch_size=5)))[1].tolist() == [-1.0] * 5
    if kind == "augmented":
        assert [float(v) for v in IndexedBatches(data).take([0, 1])[1]] == [-1.0, -1.0]
        shard = evaluate_shard(trained, model, 0, 1, batch_size=7, precision="float64")
        assert shard[0].total / shard[0].weight == pytest.approx(expected, rel=1e-9)
