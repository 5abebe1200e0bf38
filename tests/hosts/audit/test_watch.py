"""One rank, observed: what it does is written down, and nothing that it does is changed."""

from __future__ import annotations

import builtins
import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from workbench.topics.hosts import planted
from workbench.topics.hosts.watch import HostsWatch, read_facts
from workbench.topics.hosts.watch_state import hash_of, random_state
from workbench.topics.hosts.watch_training import StopAfterSteps

WATCHED: list[tuple[Any, str]] = [
    (torch, "save"), (torch.autograd, "backward"), (torch.nn.utils, "clip_grad_norm_"), (torch.nn.utils.clip_grad, "clip_grad_norm_"),
    (torch.optim.Optimizer, "__init__"), (DataLoader, "__iter__"), (DistributedSampler, "set_epoch"), (dist, "all_reduce"),
    (dist, "init_process_group"), (DistributedDataParallel, "__init__"), (builtins, "open"),
]  # fmt: skip


def seen(folder: Path, work: Callable[[], Any], **settings: Any) -> dict[str, Any]:
    """The facts of one rank that does `work`."""
    with HostsWatch(folder, **settings):
        work()
    (found,) = read_facts(folder)["ranks"]
    return found


def passes(folder: Path, loader: DataLoader[Any], times: int = 1) -> list[dict[str, Any]]:
    return seen(folder, lambda: [list(loader) for _ in range(times)])["passes"]


def data(examples: int = 12) -> TensorDataset:
    return TensorDataset(torch.arange(examples, dtype=torch.float32)[:, None].repeat(1, 3), torch.arange(examples))


def training(out: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The planted training without a bug; returns what it learned and the random state that it leaves."""
    out.mkdir(exist_ok=True)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    planted.train("", out, epochs=1)
    return torch.load(out / "last.pt", weights_only=True), random_state()


def test_training_under_the_audit_is_bitwise_the_same(alone: None, tmp_path: Path) -> None:
    plain, state = training(tmp_path / "plain")
    with HostsWatch(tmp_path / "facts"):
        watched, watched_state = training(tmp_path / "watched")
    assert hash_of(plain.values()) == hash_of(watched.values())
    assert state == watched_state
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_everything_is_put_back(alone: None, tmp_path: Path) -> None:
    before = [vars(owner).get(name) for owner, name in WATCHED]
    hooks = [
        copy.copy(vars(nn.modules.module)[name]) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    ]
    with HostsWatch(tmp_path / "facts"):
        during = [vars(owner).get(name) for owner, name in WATCHED]
        training(tmp_path / "out")
    assert sum(one is not other for one, other in zip(before, during, strict=True)) >= 10  # all but open
    assert [vars(owner).get(name) for owner, name in WATCHED] == before
    assert [vars(nn.modules.module)[name] for name in ("_global_forward_hooks", "_global_forward_pre_hooks")] == hooks


def test_an_error_puts_everything_back_too_and_is_written_down(tmp_path: Path) -> None:
    before = [vars(owner).get(name) for owner, name in WATCHED]
    with pytest.raises(ZeroDivisionError), HostsWatch(tmp_path):
        1 / 0  # noqa: B018
    assert [vars(owner).get(name) for owner, name in WATCHED] == before
    assert "ZeroDivisionError" in read_facts(tmp_path)["ranks"][0]["error"]


def test_what_a_healthy_training_leaves_behind(alone: None, tmp_path: Path) -> None:
    found = seen(tmp_path / "facts", lambda: training(tmp_path / "out"))
    steps = planted.TRAIN // 8
    assert (found["rank"], found["world"], found["initialised"], found["steps"]) == (0, 1, True, steps)
    assert found["calls"] == {"wrapped": steps, "raw": 0, "other": 0}
    assert [c["limit"] for c in found["clips"]] == [0.5] * steps
    assert [row["step"] for row in found["parameters"]] == [0, 1, 2, 3, 4, 8, 16, 32]
    assert {Path(f["path"]).name: f["kind"] for f in found["files"]} == {"log.csv": "log", "last.pt": "checkpoint"}
    assert {b["moment"] for b in found["buffers"]} == {"training", "evaluation", "checkpoint", "end"}
    train, evaluation = found["passes"]
    assert sorted(train["indices"]) == list(range(planted.TRAIN))
    assert (train["steps"], train["exhausted"], train["grad"]) == ([0, steps], True, True)
    assert (evaluation["grad"], sorted(evaluation["indices"])) == (False, list(range(planted.VALIDATION)))
    assert len(found["times"]["busy_s"]) == steps - 1
    assert {d["generator"] for d in found["draws"]} == {"torch"}


def test_parameters_are_hashed_before_the_first_update(alone: None, tmp_path: Path) -> None:
    torch.manual_seed(planted.SHARED_SEED)
    expected = hash_of(planted.build_model().parameters())
    found = seen(tmp_path / "facts", lambda: training(tmp_path / "out"))
    assert found["parameters"][0]["hash"] == found["wrappers"][0]["before"] == expected


@pytest.mark.parametrize(("module", "raw"), [("wrapped", 0), ("model", 3), ("part", 3), ("loss", 0)])
def test_calls_past_the_wrapper_are_counted(alone: None, tmp_path: Path, module: str, raw: int) -> None:
    def work() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1), nn.Softplus())
        wrapped = DistributedDataParallel(model)
        called = {"wrapped": wrapped, "model": model, "part": model[0], "loss": lambda x: model[2](wrapped(x))}[module]
        for _ in range(3):
            called(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            model.eval()(torch.ones(2, 3))  # evaluation may call the model itself

    assert seen(tmp_path / "facts", work)["calls"]["raw"] == raw


def test_indices_are_those_of_the_data_that_parts_were_taken_from(tmp_path: Path) -> None:
    part = Subset(Subset(data(), range(2, 12)), [0, 3, 5])
    (found,) = passes(tmp_path, DataLoader(part, batch_size=2))
    assert found["indices"] == [2, 5, 7]
    assert [length for length, _ in found["levels"]] == [3, 10]
    assert (found["dataset"]["length"], found["exhausted"]) == (12, True)


@pytest.mark.parametrize(
    "workers", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
def test_each_pass_holds_what_came_out_of_it(tmp_path: Path, workers: dict[str, Any]) -> None:
    loader = DataLoader(data(), batch_size=2, shuffle=True, **workers)
    given: list[list[int]] = []

    def work() -> None:
        for _ in range(2):
            given.append([int(i) for _, labels in loader for i in labels])
        given.append(
            [int(i) for i in next(iter(loader))[1]]
        )  # given up after one batch: what was fetched ahead was not seen

    found = seen(tmp_path, work)["passes"]
    assert [p["indices"] for p in found] == given
    assert [p["exhausted"] for p in found] == [True, True, False]
    assert [(p["loader"], p["pass"]) for p in found] == [(0, 0), (0, 1), (0, 2)]


def test_a_plan_is_looked_at_without_drawing_from_anything(tmp_path: Path) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(data(), num_replicas=3, rank=1, seed=5)
    expected, state = list(sampler), random_state()

    def work() -> None:
        loader = DataLoader(data(), batch_size=2, sampler=sampler, generator=torch.Generator())
        assert next(iter(loader))[1].tolist() == expected[:2]

    (found,) = seen(tmp_path, work)["passes"]
    assert random_state() == state
    assert (found["planned"], found["indices"], found["exhausted"]) == (expected, expected[:2], False)


def test_contents_are_told_apart_and_found_again(tmp_path: Path) -> None:
    once, twice = passes(tmp_path / "a", DataLoader(data(), 4), 1)[0], passes(tmp_path / "b", DataLoader(data(), 3))[0]
    assert once["contents"] == twice["contents"]
    assert len(set(once["contents"])) == 12


def test_data_of_one_kind_have_one_hash_and_others_another(tmp_path: Path) -> None:
    hashes = [
        passes(tmp_path / str(n), DataLoader(d))[0]["dataset"]["hash"]
        for n, d in enumerate((data(), data(), TensorDataset(data().tensors[0] + 1, data().tensors[1])))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(6.0)[:, None])


def test_a_stream_has_contents_and_no_indices(tmp_path: Path) -> None:
    (found,) = passes(tmp_path, DataLoader(Stream(), batch_size=4))
    assert found["dataset"]["stream"]
    assert found["indices"] == []
    assert len(set(found["contents"])) == 6


class Augmented(Dataset[Tensor]):
    def __init__(self, source: str) -> None:
        self.source, self.own = source, np.random.default_rng(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        if index >= 4:
            raise IndexError(index)
        draw = {"none": lambda: 0.0, "torch": torch.rand(()).item if self.source == "torch" else lambda: 0.0,
                "numpy": np.random.rand, "python": random.random, "own": self.own.random}  # fmt: skip
        return torch.tensor(float(draw[self.source]()))


@pytest.mark.parametrize(
    ("source", "generator"),
    [("none", set()), ("torch", {"torch"}), ("numpy", {"numpy"}), ("python", {"python"}), ("own", {"dataset.own"})],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_examples_draw_from_is_named(tmp_path: Path, source: str, generator: set[str], workers: int) -> None:
    found = seen(tmp_path, lambda: list(DataLoader(Augmented(source), num_workers=workers)))["draws"]
    assert {row["generator"] for row in found} == generator
    assert {row["worker"] for row in found} <= {None if workers == 0 else 0}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_seed_draws_alike_and_another_does_not(tmp_path: Path, workers: int) -> None:
    def states(name: str, seed: int) -> set[tuple[Any, ...]]:
        torch.manual_seed(seed)
        found = seen(tmp_path / name, lambda: list(DataLoader(Augmented("torch"), num_workers=workers)))["draws"]
        return {(row["worker"], row["look"], row["state"]) for row in found}

    first = states("a", 1)
    assert len(first) == 4
    assert first == states("b", 1)
    assert not {state for *_, state in first} & {state for *_, state in states("c", 2)}


def test_draws_of_the_loop_itself_are_seen_where_they_come_before_the_model(tmp_path: Path) -> None:
    def work() -> None:
        model = nn.Linear(3, 1)
        for inputs, _ in DataLoader(data(), batch_size=4):
            model(inputs + torch.randn_like(inputs))

    assert {row["where"] for row in seen(tmp_path, work)["draws"]} == {"batch"}


@pytest.mark.parametrize("grad", [False, True])
def test_what_the_next_epoch_draws_for_its_order_is_no_augmentation(tmp_path: Path, grad: bool) -> None:
    """The last batch before it was evaluated: with the same seed on all hosts this would look like draws alike."""

    def work() -> None:
        model = nn.Linear(3, 1)
        loader = DataLoader(data(), batch_size=4, shuffle=True, num_workers=1)
        for _ in range(2):
            for inputs, _ in loader:
                model.train()(inputs)
            with torch.set_grad_enabled(grad):
                for inputs, _ in DataLoader(data(), batch_size=6):
                    model.eval()(inputs)

    assert seen(tmp_path, work)["draws"] == []


def test_files_for_writing_are_seen_however_they_are_opened(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def work() -> None:
        (out / "a.txt").write_text("x")
        with (out / "b.csv").open("a"):
            pass
        np.save(out / "c.npy", np.zeros(2))
        torch.save({}, out / "d.pt")
        with (out / "e").open("wb") as file:
            torch.save({}, file)
        (out / "a.txt").read_text()
        (out / "f.safetensors").write_bytes(b"")

    found = {Path(f["path"]).name: f["kind"] for f in seen(tmp_path / "facts", work)["files"]}
    assert found == {
        "a.txt": "log",
        "b.csv": "log",
        "c.npy": "log",
        "d.pt": "checkpoint",
        "e": "checkpoint",
        "f.safetensors": "checkpoint",
    }
    (out / "later.txt").write_text("x")
    assert "later" not in json.dumps(read_facts(tmp_path / "facts"))


def test_clipping_takes_a_generator_of_parameters_and_returns_the_norm(tmp_path: Path) -> None:
    def work() -> None:
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.full((1, 3), 2.0)).sum().backward()
        norm = nn.utils.clip_grad_norm_((p for p in model.parameters()), max_norm=1.0)
        assert float(norm) == pytest.approx(12**0.5)
        assert float(model.weight.grad.norm()) == pytest.approx(1.0, rel=1e-5)  # type: ignore[union-attr]
        optimizer.step()

    (clip,) = seen(tmp_path, work)["clips"]
    assert (clip["limit"], clip["optimizer"], clip["norm"]) == (1.0, 0, pytest.approx(12**0.5))


def test_two_optimizers_are_told_apart(tmp_path: Path) -> None:
    def work() -> None:
        models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    found = seen(tmp_path, work)
    assert [(row["optimizer"], row["step"]) for row in found["parameters"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert found["steps"] == 2


def test_it_can_end_after_some_updates(tmp_path: Path) -> None:
    def work() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    with pytest.raises(StopAfterSteps) as stopped:
        seen(tmp_path, work, stop_after=3)
    assert stopped.value.code == 0
    (found,) = read_facts(tmp_path)["ranks"]
    assert (found["steps"], found["error"]) == (3, None)


def test_nothing_is_seen_of_a_process_that_does_nothing(tmp_path: Path) -> None:
    found = seen(tmp_path, lambda: None)
    assert (found["steps"], found["passes"], found["files"], found["buffers"], found["initialised"]) == (
        0,
        [],
        [],
        [],
        False,
    )


def test_a_second_close_changes_nothing_and_the_file_is_read_back(tmp_path: Path) -> None:
    watch = HostsWatch(tmp_path)
    path = watch.close()
    before = path.read_bytes()
    assert watch.close() == path
    assert path.read_bytes() == before
    assert json.loads(before)["rank"] == 0


def test_facts_of_an_earlier_job_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, world in ((0, 4), (3, 4), (0, 2), (1, 2)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        HostsWatch(tmp_path).close()
    assert [(r["rank"], r["world"]) for r in read_facts(tmp_path)["ranks"]] == [(0, 2), (1, 2)]
    monkeypatch.setenv("RANK", "0")
    watch = HostsWatch(tmp_path)
    assert [r["rank"] for r in read_facts(tmp_path)["ranks"]] == [
        1
    ]  # what this rank wrote before is gone from the start
    watch.close()
