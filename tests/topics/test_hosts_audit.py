"""One rank, observed: what it does is written down, nothing that it does is changed, and nothing is taken for what it is not."""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from tests.helpers import planted_hosts as planted
from workbench.errors import UsageError
from workbench.topics.hosts.watch import HostsWatch, read_facts
from workbench.topics.hosts.watch_state import State, Watchdog, hash_of, random_state, rank_file
from workbench.topics.hosts.watch_training import StopAfterSteps

WATCHED: list[tuple[Any, str]] = [
    (torch, "save"), (torch.autograd, "backward"), (torch.nn.utils, "clip_grad_norm_"), (torch.nn.utils.clip_grad, "clip_grad_norm_"),
    (torch.optim.Optimizer, "__init__"), (DataLoader, "__iter__"), (DistributedSampler, "set_epoch"), (dist, "all_reduce"),
    (dist, "init_process_group"), (DistributedDataParallel, "__init__"),
]  # fmt: skip
WAIT_S, TIMEOUT_S = 0.05, 1.0


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one, so that wrappers and collectives work in the test's own process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


def step(optimizer: Any, model: nn.Module, inputs: Tensor | None = None) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3) if inputs is None else inputs).sum().backward()
    optimizer.step()


def put_back() -> tuple[Any, ...]:
    hooks = vars(nn.modules.module)
    return (
        [vars(owner).get(name) for owner, name in WATCHED],
        [copy.copy(hooks[name]) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")],
    )


def test_training_under_the_audit_is_bitwise_the_same_and_everything_is_put_back(alone: None, tmp_path: Path) -> None:
    before = put_back()
    plain, state = training(tmp_path / "plain")
    with HostsWatch(tmp_path / "facts"):
        assert all(one is not other for one, other in zip(before[0], put_back()[0], strict=True))
        watched, watched_state = training(tmp_path / "watched")
    assert put_back() == before
    assert state == watched_state
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    with pytest.raises(ZeroDivisionError), HostsWatch(tmp_path / "error"):
        1 / 0  # noqa: B018
    assert put_back() == before
    assert len(read_facts(tmp_path / "error")["ranks"]) == 1, "what was seen until then is kept"


def test_what_a_healthy_training_leaves_behind(alone: None, tmp_path: Path) -> None:
    torch.manual_seed(planted.SHARED_SEED)
    first = hash_of(planted.build_model().parameters())
    found = seen(tmp_path / "facts", lambda: training(tmp_path / "out"))
    steps = planted.TRAIN // 8
    assert (found["rank"], found["world"], found["initialised"], found["steps"]) == (0, 1, True, steps)
    assert found["calls"] == {"wrapped": steps, "raw": 0, "other": 0}
    assert [c["limit"] for c in found["clips"]] == [0.5] * steps
    assert [row["step"] for row in found["parameters"]] == [0, 1, 2, 3, 4, 8, 16, 32]
    assert found["parameters"][0]["hash"] == found["wrappers"][0]["before"] == first
    assert {Path(f["path"]).name: f["kind"] for f in found["files"]} == {"log.csv": "log", "last.pt": "checkpoint"}
    assert {b["moment"] for b in found["buffers"]} == {"training", "evaluation", "checkpoint", "end"}
    train, evaluation = found["passes"]
    assert sorted(train["indices"]) == list(range(planted.TRAIN))
    assert (train["steps"], train["exhausted"], train["grad"]) == ([0, steps], True, True)
    assert (evaluation["grad"], sorted(evaluation["indices"])) == (False, list(range(planted.VALIDATION)))
    assert len(found["times"]["busy_s"]) == steps - 1
    assert {d["generator"] for d in found["draws"]} == {"torch"}


# Models and updates.


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
        assert float(nn.utils.clip_grad_norm_((p for p in [weight]), max_norm=0.5)) > 0.5
        expected["at_step"] = hash_of([weight.grad])
        optimizer.step()

    found = seen(tmp_path / "facts", work)
    (row,) = found["gradients"]
    assert {name: row[name] for name in expected} == expected
    assert len(set(expected.values())) == 4
    assert [(c["by"], c["limit"]) for c in found["clips"]] == [("clip_grad_norm_", 0.5)]


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
    assert found["steps"] == 3


def test_a_rank_is_not_busy_while_its_last_gradient_is_averaged(alone: None, tmp_path: Path) -> None:
    def slow(_: Any, bucket: Any) -> Any:
        time.sleep(WAIT_S)  # as where another rank comes later
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    slow.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}  # torch reads them

    def work() -> None:
        model = DistributedDataParallel(nn.Linear(3, 1))
        model.register_comm_hook(None, slow)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    times = seen(tmp_path / "facts", work)["times"]
    assert len(times["busy_s"]) == 3
    assert all(step - busy >= 0.9 * WAIT_S for step, busy in zip(times["step_s"], times["busy_s"], strict=True))


# Data.


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


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(6.0)[:, None])


def test_contents_and_data_sets_are_told_apart_and_found_again(tmp_path: Path) -> None:
    other = TensorDataset(data().tensors[0] + 1, data().tensors[1])
    once, twice, changed = (
        passes(tmp_path / str(n), DataLoader(d, batch_size=n + 3))[0] for n, d in enumerate((data(), data(), other))
    )
    assert once["contents"] == twice["contents"]
    assert len(set(once["contents"])) == 12
    assert once["dataset"]["hash"] == twice["dataset"]["hash"] != changed["dataset"]["hash"]
    part = Subset(Subset(data(), range(2, 12)), [0, 3, 5])
    (found,) = passes(tmp_path / "part", DataLoader(part, batch_size=2))
    assert (found["indices"], found["dataset"]["length"]) == ([2, 5, 7], 12)
    assert [length for length, _ in found["levels"]] == [3, 10]
    (found,) = passes(tmp_path / "stream", DataLoader(Stream(), batch_size=4))
    assert found["dataset"]["stream"]
    assert (found["indices"], len(set(found["contents"]))) == ([], 6)


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
    ("source", "generator", "workers"),
    [
        ("none", set(), 0),
        ("torch", {"torch"}, 1),
        ("numpy", {"numpy"}, 0),
        ("python", {"python"}, 0),
        ("own", {"dataset.own"}, 0),
    ],
)
def test_what_examples_draw_from_is_named(tmp_path: Path, source: str, generator: set[str], workers: int) -> None:
    found = seen(tmp_path, lambda: list(DataLoader(Augmented(source), num_workers=workers)))["draws"]
    assert {row["generator"] for row in found} == generator
    assert {row["worker"] for row in found} <= {None if workers == 0 else 0}


def test_draws_are_seen_where_they_come_before_the_model_and_those_for_an_order_are_no_augmentation(
    tmp_path: Path,
) -> None:
    model = nn.Linear(3, 1)

    def augmented() -> None:
        for inputs, _ in DataLoader(data(), batch_size=4):
            model(inputs + torch.randn_like(inputs))

    def next_epoch(grad: bool) -> None:
        """The last batch before it was evaluated: with the same seed on all hosts this would look like draws alike."""
        loader = DataLoader(data(), batch_size=4, shuffle=True, num_workers=1)
        for _ in range(2):
            for inputs, _ in loader:
                model.train()(inputs)
            with torch.set_grad_enabled(grad):
                for inputs, _ in DataLoader(data(), batch_size=6):
                    model.eval()(inputs)

    def kept() -> None:
        """More batches than are looked at, two epochs in a list."""
        loader = DataLoader(TensorDataset(torch.ones(20, 3)), batch_size=2, shuffle=True)
        for (inputs,) in [batch for _ in range(2) for batch in loader]:
            model(inputs)

    assert {row["where"] for row in seen(tmp_path / "a", augmented)["draws"]} == {"batch"}
    for name, work in (("b", lambda: next_epoch(False)), ("c", lambda: next_epoch(True)), ("d", kept)):
        assert seen(tmp_path / name, work)["draws"] == [], name


# Files, collectives, processes.


def test_files_for_writing_are_seen_however_they_are_opened(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("r+", "rb"):
        (out / name).write_text("x")

    def work() -> None:
        (out / "a.txt").write_text("x")
        for mode in ("x", "r+", "rb", "a"):
            with (out / mode).open(mode):
                pass
        np.save(out / "c.npy", np.zeros(2))
        torch.save({}, out / "d.pt")
        with (out / "e").open("wb") as file:
            torch.save(obj={}, f=file)
        (out / "a.txt").read_text()
        (out / "f.safetensors").write_bytes(b"")
        safetensors.torch.save_file({"x": torch.ones(1)}, filename=out / "g")

    found = {Path(f["path"]).name: f["kind"] for f in seen(tmp_path / "facts", work)["files"]}
    logs = dict.fromkeys(("a.txt", "x", "r+", "a", "c.npy"), "log")
    assert found == logs | dict.fromkeys(("d.pt", "e", "f.safetensors", "g"), "checkpoint")
    (out / "later.txt").write_text("x")
    assert "later" not in json.dumps(read_facts(tmp_path / "facts"))


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
    assert seen(tmp_path / "made of others", lambda: dist.all_gather_object([None], "part"))["joined"]["training"] == [
        0
    ]


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


def worker(rank: int) -> None:
    """Never started."""


def test_a_rank_does_not_start_all_ranks_again_and_others_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(mp, "spawn", lambda *args, **kwargs: started.append(args))
    assert seen(tmp_path / "own", lambda: mp.spawn(worker, (), 3))["spawned"] == 3
    assert started == [(worker, (), 3)]
    with (
        HostsWatch(tmp_path / "facts", launched=True),
        pytest.raises(UsageError, match=r"starts 4 processes itself.*Call worker with int\(os.environ\['RANK'\]\)"),
    ):
        mp.spawn(worker, nprocs=4)


def test_facts_of_an_earlier_job_do_not_count_and_a_second_close_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, world in ((0, 4), (3, 4), (0, 2), (1, 2)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        HostsWatch(tmp_path).close()
    assert [(r["rank"], r["world"]) for r in read_facts(tmp_path)["ranks"]] == [(0, 2), (1, 2)]
    monkeypatch.setenv("RANK", "0")
    watch = HostsWatch(tmp_path)
    assert [r["rank"] for r in read_facts(tmp_path)["ranks"]] == [1], (
        "what this rank wrote before is gone from the start"
    )
    before = watch.close().read_bytes()
    assert watch.close().read_bytes() == before


# Waiting, and standing still.


def test_waiting_inside_of_waiting_counts_once_and_where_it_fails_is_where_the_rank_was(tmp_path: Path) -> None:
    state = State(tmp_path)
    began = time.perf_counter()
    with state.waiting("all_gather_object"), state.waiting("all_gather"):
        time.sleep(WAIT_S)
        assert state.phase == "waiting in all_gather_object"
    assert WAIT_S <= state.waited_s <= time.perf_counter() - began
    assert state.phase == "starting"
    with pytest.raises(RuntimeError), state.waiting("barrier"):
        raise RuntimeError("closed by peer")
    assert state.phase == "waiting in barrier"


def stood_still(folder: Path) -> bool:
    return rank_file(folder, "stack", 0).stat().st_size > 0


def test_progress_puts_the_time_out_off_and_standing_still_does_not(tmp_path: Path) -> None:
    state = State(tmp_path, rank=0)
    dog = Watchdog(state, TIMEOUT_S)
    try:
        until = time.monotonic() + 2.2 * TIMEOUT_S
        while time.monotonic() < until:
            state.tick("forward")
            time.sleep(0.02)
        assert not stood_still(tmp_path)
        state.step, state.phase = 7, "loading"
        until = time.monotonic() + 20 * TIMEOUT_S
        while not stood_still(tmp_path) and time.monotonic() < until:
            time.sleep(0.05)
        said = json.loads(rank_file(tmp_path, "status", 0).read_text())
        assert (said["step"], said["phase"], said["state"]) == (7, "loading", "running")
    finally:
        dog.close()
    assert "test_progress_puts_the_time_out_off" in rank_file(tmp_path, "stack", 0).read_text()
    assert json.loads(rank_file(tmp_path, "status", 0).read_text())["state"] == "finished"
