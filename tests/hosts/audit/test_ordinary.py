"""One rank, observed, doing what scripts do: nothing of it is an error, and nothing is taken for what it is not."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.hosts.audit.test_watch import seen
from workbench.errors import UsageError
from workbench.topics.hosts.watch import HostsWatch, read_facts
from workbench.topics.hosts.watch_state import hash_of


def step(optimizer: Any, model: nn.Module, inputs: Tensor | None = None) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3) if inputs is None else inputs).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("reentrant", [False, True])
def test_parts_that_are_computed_again_in_backward_are_not_called_past_the_wrapper(
    alone: None, tmp_path: Path, reentrant: bool
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))

        def forward(self, inputs: Tensor) -> Any:
            return checkpoint(self.part, self.first(inputs), use_reentrant=reentrant)

    def work() -> None:
        net = Net()
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for called in (model, model, net):
            step(optimizer, called)

    assert seen(tmp_path / "facts", work)["calls"] == {"wrapped": 2, "raw": 1, "other": 0}


def test_sparse_gradients_are_told_apart() -> None:
    def gradient(place: int, value: float, twice: bool = False) -> Tensor:
        places = [[place, place]] if twice else [[place]]
        values = [value / 2, value / 2] if twice else [value]
        return torch.sparse_coo_tensor(places, values, (5,), check_invariants=True)

    first = hash_of([gradient(1, 2.0)])
    assert first == hash_of([gradient(1, 2.0)]) == hash_of([gradient(1, 2.0, twice=True)])
    assert len({first, hash_of([gradient(2, 2.0)]), hash_of([gradient(1, 3.0)])}) == 3
    assert hash_of([torch.empty(3, device="meta")]) != hash_of([torch.empty(4, device="meta")])


def test_an_update_made_of_others_is_one(tmp_path: Path) -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), {})
            self.inner = torch.optim.SGD([next(iter(model.parameters()))], 0.1)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    def work() -> None:
        model = nn.Linear(3, 1)
        outer = Outer(model)
        for _ in range(3):
            step(outer, model)

    found = seen(tmp_path, work)
    assert found["steps"] == 3
    assert {row["optimizer"] for row in found["parameters"]} == {0}


def test_steps_are_counted_by_whichever_optimizer_makes_them(tmp_path: Path) -> None:
    """One that is never used, one for the head, then two that take turns: five and four updates of each."""

    def work() -> None:
        model = nn.Linear(3, 1)
        torch.optim.SGD(model.parameters(), 0.1)
        head = torch.optim.SGD([model.bias], 0.1)
        for _ in range(5):
            step(head, model)
        both = [torch.optim.SGD([p], 0.1) for p in model.parameters()]
        for _ in range(4):
            model(torch.ones(2, 3)).sum().backward()
            for optimizer in both:
                optimizer.step()

    assert (
        seen(tmp_path, work)["steps"] == 5 + 3
    )  # the first of the new ones shows only afterwards that the old one is over


def test_gradients_are_seen_where_backward_ends_where_the_script_joins_them_and_where_they_are_used(
    alone: None, tmp_path: Path
) -> None:
    expected: dict[str, str] = {}

    def work() -> None:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], 0.1)
        (3 * weight).sum().backward()
        expected["after_backward"] = hash_of([weight.grad])
        weight.grad /= 2  # type: ignore[operator]
        expected["at_joining"] = hash_of([weight.grad])
        dist.all_reduce(weight.grad)
        weight.grad += 1
        dist.all_reduce(torch.ones(1))
        expected["before_clip"] = hash_of([weight.grad])
        norm = nn.utils.get_total_norm([weight.grad])  # type: ignore[list-item]
        nn.utils.clip_grads_with_norm_([weight], 0.5, norm)
        expected["at_step"] = hash_of([weight.grad])
        optimizer.step()

    found = seen(tmp_path / "facts", work)
    (row,) = found["gradients"]
    assert {name: row[name] for name in expected} == expected
    assert len(set(expected.values())) == 4
    assert [(c["by"], c["limit"]) for c in found["clips"]] == [("clip_grads_with_norm_", 0.5)]


def test_names_that_a_script_has_imported_before_are_watched_and_put_back(alone: None, tmp_path: Path) -> None:
    script = ModuleType("a_script")
    exec(
        "from torch.distributed import all_reduce\nfrom torch.nn.utils import clip_grad_norm_ as renamed", vars(script)
    )
    before = dict(vars(script))
    sys.modules["a_script"] = script
    try:
        found = seen(tmp_path / "facts", lambda: vars(script)["all_reduce"](torch.ones(1)))
    finally:
        del sys.modules["a_script"]
    assert found["joined"]["training"] == [0]
    assert vars(script) == before


@pytest.mark.parametrize("how", ["eval", "no_grad", "copy"])
@pytest.mark.parametrize("looks", [True, False])
def test_what_joins_hosts_after_any_look_at_a_model_belongs_to_an_evaluation(
    alone: None, tmp_path: Path, how: str, looks: bool
) -> None:
    def work() -> None:
        model, average = nn.Linear(3, 1), nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step(optimizer, model)
        if looks:
            with torch.set_grad_enabled(how == "eval"):
                called = average if how == "copy" else model
                (called if how == "no_grad" else called.eval())(torch.ones(1, 3))
        with torch.no_grad():
            nn.MSELoss()(torch.ones(1), torch.ones(1))  # a metric is no model
        dist.all_reduce(torch.ones(1))
        step(optimizer, model.train())
        dist.all_reduce(torch.ones(1))

    joined = seen(tmp_path / "facts", work)["joined"]
    assert joined == ({"evaluation": [1], "training": [2]} if looks else {"evaluation": [], "training": [1, 2]})


class Windows(Dataset[Tensor]):
    """Looks like a part of another data set, and is none; its length is no number."""

    def __init__(self, length: Any) -> None:
        self.dataset = torch.eye(9).to_sparse()
        self.indices = [(first, first + 2) for first in range(4)]
        self.length = length

    def __len__(self) -> int:
        return int(self.length)

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(2) * self.indices[index][0]


@pytest.mark.parametrize(("length", "known"), [(4, 4), ("unknown", None)])
def test_data_sets_of_any_kind_are_no_error(tmp_path: Path, length: Any, known: int | None) -> None:
    loader = DataLoader(Windows(length), sampler=[0, 2])
    (found,) = seen(tmp_path, lambda: list(loader))["passes"]
    assert (found["indices"], found["levels"], found["dataset"]["length"]) == ([0, 2], [], known)


def test_batches_that_are_kept_draw_nothing_for_the_model(tmp_path: Path) -> None:
    """More of them than are looked at, two epochs in a list: what the second one draws for its order is no augmentation."""

    def work() -> None:
        loader = DataLoader(TensorDataset(torch.ones(20, 3)), batch_size=2, shuffle=True)
        batches = [batch for _ in range(2) for batch in loader]
        model = nn.Linear(3, 1)
        for (inputs,) in batches:
            model(inputs)

    assert seen(tmp_path, work)["draws"] == []


def test_statistics_are_those_of_one_model_throughout(tmp_path: Path) -> None:
    """What a second model keeps is not compared with what the first one kept on another host."""

    def work() -> None:
        first, second = (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2))
        for model in (first, second):
            step(torch.optim.SGD(model.parameters(), 0.1), model, torch.randn(4, 3))
        with torch.no_grad():
            second.eval()(torch.ones(1, 3))

    assert [row["moment"] for row in seen(tmp_path, work)["buffers"]] == ["training", "end"]


@pytest.mark.parametrize(
    ("mode", "there", "writes"), [("x", False, True), ("r+", True, True), ("a", True, True), ("rb", True, False)]
)
def test_every_way_of_opening_a_file_for_writing_counts(tmp_path: Path, mode: str, there: bool, writes: bool) -> None:
    path = tmp_path / "file.txt"
    if there:
        path.write_text("x")

    def work() -> None:
        with path.open(mode):
            pass

    assert [f["path"] for f in seen(tmp_path / "facts", work)["files"]] == [str(path)] * writes


def test_a_collective_that_is_made_of_others_is_one(alone: None, tmp_path: Path) -> None:
    found = seen(tmp_path / "facts", lambda: dist.all_gather_object([None], "part"))
    assert found["joined"]["training"] == [0]


def test_the_folder_of_a_temporary_file_is_no_file(tmp_path: Path) -> None:
    def work() -> None:
        with tempfile.NamedTemporaryFile(dir=tmp_path, suffix=".txt") as file:
            file.write(b"x")

    (found,) = seen(tmp_path / "facts", work)["files"]
    assert found["path"].endswith(".txt")


def test_a_group_that_something_else_began_is_noticed(tmp_path: Path) -> None:
    begin = distributed_c10d.init_process_group  # as `init_device_mesh` holds it

    def work() -> None:
        begin("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
        nn.Linear(3, 1)(torch.ones(1, 3))
        dist.destroy_process_group()

    assert seen(tmp_path / "facts", work)["initialised"]


def worker(rank: int) -> None:
    """Never started."""


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[HostsWatch]:
    with HostsWatch(tmp_path / "facts", launched=True) as watch:
        yield watch


def test_a_rank_does_not_start_all_ranks_again(launched: HostsWatch) -> None:
    with pytest.raises(UsageError, match=r"starts 4 processes itself.*Call worker with int\(os.environ\['RANK'\]\)"):
        mp.spawn(worker, nprocs=4)


def test_processes_that_a_script_starts_itself_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(mp, "spawn", lambda *args, **kwargs: started.append(args))
    found = seen(tmp_path, lambda: mp.spawn(worker, (), 3))
    assert started == [(worker, (), 3)]
    assert found["spawned"] == 3
    assert read_facts(tmp_path)["ranks"] == [found]
