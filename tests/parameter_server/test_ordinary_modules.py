"""Modules as people write them, moved to the servers as they are: the same as torch alone, or an error that says what to do (T1.1)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.workloads import small_workload
from workbench.config import TrainConfig
from workbench.errors import ConfigError, UsageError
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator, merge_buffers
from workbench.parameter_server.errors import ClosureInputError, UnavailableError
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.checkpoint_manager import CheckpointManager
from workbench.parameter_server.training.evaluation import evaluate_direct
from workbench.parameter_server.training.strategy_model import StrategyModel
from workbench.parameter_server.training.trainer import ParameterServerTrainer
from workbench.record.events import read_events
from workbench.topics.parameter_server.study import ParameterServerStudy, audit_parameter_server
from workbench.train.trainer import Trainer

UPDATES = 6


def config(**fields: Any) -> TrainConfig:
    return TrainConfig(**{"peak_lr": 0.1, "total_steps": 40, "batch_size": 8, "optimizer": "sgd"} | fields)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(20, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids))  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 4), nn.Linear(4, 20, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.words(ids).mean(1)))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x[..., None])[0][:, -1])  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Parameters of no axis, of no value, and one that does not lie in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3).t())
        self.scale, self.none = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))
        self.classes = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) * self.scale + self.classes


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    module[0].requires_grad_(False)
    return module


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def with_parametrized_weight() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))


def batch(number: int, *, ids: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(0, 20, (8, 5), generator=generator) if ids else torch.randn(8, 5, generator=generator)
    return x, torch.randint(0, 3, (8,), generator=generator)


def update(placed: PlacedModule, x: Tensor, y: Tensor) -> None:
    with placed.step() as module:
        functional.cross_entropy(module(x), y).backward()


SGD = (config(), torch.optim.SGD, {"lr": 0.1})
DECAYED = (config(weight_decay=0.1), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1})
MOMENTUM = (config(optimizer="momentum"), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
RMSPROP = (config(optimizer="rmsprop", peak_lr=0.01), torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "momentum": 0.9})
ADAM = (config(optimizer="adam", peak_lr=0.01), torch.optim.Adam, {"lr": 0.01})
ADAMW = (config(optimizer="adamw", peak_lr=0.01), torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.0})


@pytest.mark.parametrize(
    ("make", "ids", "rule"),
    [
        (Bag, True, SGD), (Tied, True, ADAM), (Recurrent, False, SGD), (Odd, False, SGD), (half_frozen, False, DECAYED),
        (with_statistics, False, SGD), (with_parametrized_weight, False, SGD), (half_frozen, False, MOMENTUM),
        (half_frozen, False, RMSPROP), (half_frozen, False, ADAMW),
    ],
)  # fmt: skip
def test_one_worker_trains_it_as_torch_does(
    lone_cluster: Cluster, make: Callable[[], nn.Module], ids: bool, rule: tuple[Any, Any, Any]
) -> None:
    """Parameters and buffers, what is frozen too; embeddings with sparse gradients, tied weights and odd shapes included."""
    torch.manual_seed(0)
    module, (fields, kind, arguments) = make(), rule
    strategy = ParameterServerStrategy(lone_cluster, variable_partitioner=FixedShardsPartitioner(2))
    coordinator = ClusterCoordinator(strategy)
    placed = strategy.place(copy.deepcopy(module), fields)
    optimizer = kind([p for p in module.parameters() if p.requires_grad], **arguments)
    start = copy.deepcopy(module.state_dict())
    for number in range(UPDATES):
        x, y = batch(number, ids=ids)
        coordinator.schedule(update, args=(placed, x, y))
        optimizer.zero_grad()
        functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    coordinator.join()
    merge_buffers(coordinator, placed)
    found, expected = placed.module().state_dict(), module.state_dict()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(start[key], expected[key]) for key in start), "there was something to learn"
    coordinator.shutdown()
    placed.delete()


@pytest.mark.parametrize(
    "parametrized", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal]
)  # fmt: skip
def test_what_torch_does_not_pickle_travels_all_the_same(
    strategy: ParameterServerStrategy, parametrized: Callable[..., nn.Module]
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(parametrized(nn.Linear(5, 3)), nn.Linear(3, 3), parametrized(nn.Linear(3, 2)))
    module[2].requires_grad_(False)
    ways = pytest.importorskip("ray.cloudpickle")  # weight norm has a local function in it
    with pytest.raises(RuntimeError, match="parametrized modules"):
        ways.dumps(module)
    placed = strategy.place(module, config())
    arrived = pickle.loads(ways.dumps(placed))._module
    assert [(name, p.requires_grad) for name, p in arrived.named_parameters()] == [
        (name, p.requires_grad) for name, p in module.named_parameters()
    ]
    torch.testing.assert_close(dict(arrived.state_dict()), dict(module.state_dict()), rtol=0, atol=0)
    x = torch.randn(4, 5)
    torch.testing.assert_close(arrived.eval()(x), module.eval()(x), rtol=0, atol=0)
    arrived(x).sum().backward()
    assert all(p.grad is not None for p in arrived.parameters() if p.requires_grad)


def test_what_is_frozen_is_on_no_server_and_in_the_checkpoint(
    strategy: ParameterServerStrategy, tmp_path: Path
) -> None:
    """It neither decays nor travels; a program that is started again with other random values gets it back."""
    fields = config(weight_decay=0.5, optimizer="adamw")
    placed = strategy.place(half_frozen(), fields)
    before = copy.deepcopy(placed.module()[0].state_dict())  # type: ignore[index]
    assert {part.parameter for held in placed.parts.values() for part in held} == {"2.weight", "2.bias"}
    for number in range(3):
        update(placed, *batch(number, ids=False))
    torch.testing.assert_close(placed.module()[0].state_dict(), before, rtol=0, atol=0)  # type: ignore[index]
    CheckpointManager(placed, tmp_path).save()
    other = strategy.place(half_frozen(), fields)
    assert not torch.equal(other.module()[0].weight, before["weight"])  # type: ignore[index]
    CheckpointManager(other, tmp_path).restore()
    torch.testing.assert_close(other.module().state_dict(), placed.module().state_dict(), rtol=0, atol=0)


def build_half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    module[0].requires_grad_(False)
    return module


def looked_up(model: nn.Module, given: Any) -> Tensor:
    return model(given[0].abs().long().clamp(0, 3)).squeeze(-1)  # type: ignore[no-any-return]


def build_sparse() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(4, 4, sparse=True), nn.Linear(4, 1))


@pytest.mark.parametrize(("build", "fields"), [(build_half_frozen, {}), (build_sparse, {"forward": looked_up})])
def test_trials_train_it_as_the_trainer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module], fields: dict[str, Any]
) -> None:
    """T10.2 to T10.4: one worker, bit for bit, also where a server died half way and the trial went on from its checkpoint."""
    workload = small_workload(build_model=build, config={"total_steps": 10, "weight_decay": 0.1}, **fields)
    real, pushes = PlacedModule.push_flat, []

    def push(self: PlacedModule, grads: Any, versions: Any) -> list[int]:
        pushes.append(1)
        if len(pushes) == 6:
            raise UnavailableError("ps", 1)
        return real(self, grads, versions)

    monkeypatch.setattr(PlacedModule, "push_flat", push)
    monkeypatch.setattr("workbench.parameter_server.coordinator.dispatch.TRANSIENT_FAILURES", 0)
    trainer = ParameterServerTrainer(workers=1)
    ours = trainer.run(workload, out=tmp_path / "a")
    told = [event["state"] for event in read_events(ours.folder) if "state" in event]
    assert told == ["running", "failed", "running", "complete"]
    theirs = Trainer(device="cpu").run(workload, out=tmp_path / "b")
    assert ours.steps["loss"].tolist() == theirs.steps["loss"].tolist()
    assert ours.evals["value"].tolist() == theirs.evals["value"].tolist()


def test_workers_train_behind_the_coordinators_frozen_layer(tmp_path: Path) -> None:
    """Also where `build_model` gives it other weights every time: an epoch's losses at no learning rate average to the evaluation."""
    generator = torch.Generator().manual_seed(0)

    def build() -> nn.Module:
        module = build_half_frozen()
        module[0].weight.data.copy_(torch.randn(4, 3, generator=generator))
        return module

    workload = small_workload(build_model=build, config={"total_steps": 6, "peak_lr": 1e-15, "eval_every_steps": 6})
    ours = ParameterServerTrainer(workers=1, evaluate_also=["train"]).run(workload, out=tmp_path / "a")
    evals = ours.evals
    (first,) = evals[(evals.split == "train") & (evals.metric == "loss") & (evals.step == 0)]["value"]
    assert ours.steps["loss"].mean() == pytest.approx(first, rel=1e-12)


def test_parts_with_rules_of_their_own_are_placed_one_by_one(strategy: ParameterServerStrategy) -> None:
    """What parameter groups and two optimizers are in a loop of one process."""
    torch.manual_seed(0)
    body, head = nn.Linear(5, 4), nn.Linear(4, 3)
    placed = [strategy.place(copy.deepcopy(body), config()), strategy.place(copy.deepcopy(head), config(peak_lr=1.0))]
    optimizer = torch.optim.SGD([{"params": body.parameters()}, {"params": head.parameters(), "lr": 1.0}], lr=0.1)
    for number in range(3):
        x, y = batch(number, ids=False)
        with placed[0].step() as first, placed[1].step() as second:
            functional.cross_entropy(second(first(x)), y).backward()
        optimizer.zero_grad()
        functional.cross_entropy(head(body(x)), y).backward()
        optimizer.step()
    for found, expected in zip(placed, (body, head), strict=True):
        torch.testing.assert_close(found.module().state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)


def statistics(placed: PlacedModule) -> Tensor:
    found: Any = placed.module().state_dict()["1.running_mean"]
    return found  # type: ignore[no-any-return]


def test_statistics_lie_on_the_workers_until_they_are_merged(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, tmp_path: Path
) -> None:
    """Twice in a row: counters start where the replicas began, not where the last merge ended."""
    placed = strategy.place(with_statistics(), config())
    assert statistics(placed).tolist() == [0.0] * 7, "no warning before training"
    for number in range(9):
        coordinator.schedule(update, args=(placed, *batch(number, ids=False)))
    coordinator.join()
    with pytest.warns(
        UserWarning, match=r"running statistics lie on the workers.*merge_buffers\(coordinator, placed\)"
    ):
        assert statistics(placed).tolist() == [0.0] * 7
    with pytest.warns(UserWarning, match="running statistics"):
        CheckpointManager(placed, tmp_path / "unmerged").save()
    for _ in range(2):
        merged = merge_buffers(coordinator, placed)
        assert int(merged["1.num_batches_tracked"]) == 9
        assert torch.equal(statistics(placed), merged["1.running_mean"])
    assert statistics(placed).abs().max() > 0.01
    CheckpointManager(placed, tmp_path / "merged").save()
    other = strategy.place(with_statistics(), config())
    CheckpointManager(other, tmp_path / "merged").restore()
    assert torch.equal(statistics(other), merged["1.running_mean"])


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.layer.doubled = self.layer.weight * 2


@pytest.mark.parametrize(
    ("module", "fields", "says"),
    [
        (nn.LazyLinear(3), config(), r"without a shape: weight, bias\. Call the module once on one batch"),
        (nn.ReLU(), config(), "0 parameters and none that needs a gradient"),
        (nn.Linear(5, 3).requires_grad_(False), config(), "2 parameters and none that needs a gradient"),
        (nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3).double()), config(), r"float32, torch\.float64; one real dtype"),
        (nn.Linear(5, 3, dtype=torch.cfloat), config(), "complex64; one real dtype is needed"),
        (nn.Linear(5, 3, device="meta"), config(), r"'weight' is on the device 'meta': .* compute on the CPU.* \.cpu\(\) on the module"),
        (nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, affine=False, device="meta")), config(), r"'1\.running_mean' is on the device"),
        (nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), config(), r"0 has max_norm=1\.0: .* writes the table's rows over.*Leave it out"),
        (Computed(), config(), r"keeps layer\.doubled, a tensor that was computed .* Compute it in forward"),
        (nn.Linear(5, 3).parameters(), config(), "takes a torch.nn.Module, not generator"),
        (nn.Linear(5, 3), torch.optim.SGD(nn.Linear(5, 3).parameters(), lr=0.1), "config is SGD and must be a TrainConfig"),
        (nn.Linear(5, 3), config(optimizer=torch.optim.Adagrad), "is a factory"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_told_at_once(
    strategy: ParameterServerStrategy, module: Any, fields: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        strategy.place(module, fields)


def too_late(placed: PlacedModule) -> None:
    x, y = batch(0, ids=False)
    with placed.step() as module:
        loss = functional.cross_entropy(module(x), y)
    loss.backward()


def own_optimizer(placed: PlacedModule) -> None:
    x, y = batch(0, ids=False)
    with placed.step() as module:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("step", [too_late, own_optimizer])
def test_a_step_without_a_gradient_is_an_error(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, step: Callable[[PlacedModule], None]
) -> None:
    """It would train nothing, and count as an update."""
    placed = strategy.place(nn.Linear(5, 3), config())
    coordinator.schedule(step, args=(placed,))
    with pytest.raises(UsageError, match=r"No parameter has a gradient.*inside of `with placed\.step\(\) as module`"):
        coordinator.join()
    assert placed.steps == 0


def replace_weight(module: nn.Module) -> None:
    module[3].weight = nn.Parameter(torch.zeros(3, 7))  # type: ignore[index, union-attr]


def changed_update(placed: PlacedModule, x: Tensor, y: Tensor, change: Callable[[nn.Module], object]) -> None:
    with placed.step() as module:
        change(module)
        functional.cross_entropy(module(x.to(module[0].weight.dtype)), y).backward()  # type: ignore[index, union-attr, arg-type]


def clip_weight(module: nn.Module) -> None:
    with torch.no_grad():
        module[3].weight.clamp_(-0.1, 0.1)  # type: ignore[index, union-attr, operator]


@pytest.mark.parametrize("change", [nn.Module.double, replace_weight, clip_weight])
def test_a_module_that_is_changed_in_a_step_is_an_error(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, change: Callable[[nn.Module], object]
) -> None:
    """What is pulled would not reach it any more, or the change would be lost; once the step is mended all goes on, with its statistics."""
    placed = strategy.place(with_statistics(), config())
    workers = strategy.num_workers
    for number in range(2):
        coordinator.on_every_worker(update, [placed, *batch(number, ids=False)])
        coordinator.schedule(changed_update, args=(placed, *batch(number, ids=False), change))
        with pytest.raises(
            UsageError, match=r"was written, cast, moved or replaced.*nothing was sent.*torch\.autocast"
        ):
            coordinator.join()
        assert placed.steps == (number + 1) * workers
    merged = merge_buffers(coordinator, placed)
    assert 2 * workers <= int(merged["1.num_batches_tracked"]) <= 2 * workers + 2
    assert merged["1.running_mean"].dtype == torch.float32


def test_what_is_thawed_in_a_step_is_an_error(strategy: ParameterServerStrategy) -> None:
    placed = strategy.place(half_frozen(), config())
    x, y = batch(0, ids=False)
    with (
        pytest.raises(UsageError, match=r"0\.weight, 0\.bias got a gradient, and needed none"),
        placed.step() as module,
    ):
        functional.cross_entropy(module.requires_grad_(True)(x), y).backward()


def test_freezing_the_original_afterwards_changes_nothing(strategy: ParameterServerStrategy) -> None:
    original = nn.Linear(5, 3)
    placed = strategy.place(original, config())
    before = {key: value.clone() for key, value in original.state_dict().items()}
    original.requires_grad_(False)
    for number in range(2):
        update(placed, *batch(number, ids=False))
    assert placed.steps == 2
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in before.items())
    changed = zip(placed.module().parameters(), original.parameters(), strict=True)
    assert all(not torch.equal(new, old) for new, old in changed)


def test_torch_optimizers_stay_where_they_are(coordinator: ClusterCoordinator) -> None:
    """Each worker would train a copy: nothing fails, and nothing is learned."""
    module = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def captures() -> None:
        optimizer.step()

    says = r"SGD, a torch optimizer: .* strategy\.place\(module, TrainConfig"
    with pytest.raises(UsageError, match=says):
        coordinator.schedule(print, args=([{"with": optimizer}],))
    coordinator.schedule(captures)
    with pytest.raises(ClosureInputError, match="'optimizer', a torch optimizer"):
        coordinator.join()
    cells: dict[str, Any] = {"__name__": "__main__", "shared": optimizer}
    exec("def notebook():\n    shared.step()", cells)
    coordinator.schedule(cells["notebook"])
    with pytest.raises(ClosureInputError, match="'shared', a torch optimizer"):
        coordinator.join()


def test_a_module_that_was_not_placed_is_not_trained(coordinator: ClusterCoordinator) -> None:
    """In threads the workers would share it, elsewhere each would train a copy."""
    module = nn.Linear(5, 3)
    with pytest.raises(UsageError, match=r"module in training mode \(Linear\) .* strategy\.place\(module"):
        coordinator.schedule(nn.Module.state_dict, args=(module,))
    found = coordinator.schedule(nn.Module.state_dict, args=(module.eval(),)).fetch()
    assert torch.equal(found["weight"], module.weight)


def test_a_placed_module_says_how_to_come_by_a_module(strategy: ParameterServerStrategy) -> None:
    placed = strategy.place(nn.Linear(5, 3), config())
    with pytest.raises(AttributeError, match=r"no attribute 'parameters'\. .* placed\.module\(\) a plain copy"):
        placed.parameters()
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'\.$"):
        placed.nothing  # noqa: B018
    with pytest.raises(UsageError, match=r"takes a TrainConfig, not 0\.1: placed\.config\.replace"):
        placed.reconfigure(0.1)  # type: ignore[arg-type]


def forgets_to_return(placed: PlacedModule, given: Any, workload: Any) -> None:
    with placed.step() as module:
        workload.loss(module(given[0]), given).mean().backward()


WRONG: list[tuple[str, type, Callable[[Any, Any], object]]] = [
    (r"placed must be what strategy\.place\(module, config\)", UsageError, lambda m, _: evaluate_direct(m, small_workload(), [])),
    (r"placed must be what strategy\.place\(module, config\)", UsageError, CheckpointManager),
    ("variables must be a dict of names", UsageError, lambda _, path: CheckpointManager(None, path, variables=[1])),  # type: ignore[arg-type]
    ("takes the wb.ps.ClusterCoordinator of the loop, not Linear", UsageError, lambda m, _: audit_parameter_server(m)),
    ("workload must be a Workload, not Linear: model, loss, data and config", UsageError, lambda m, _: StrategyModel(m)),
    (r"train_step returned NoneType; it has to return Stepped\(", UsageError,
     lambda *_: StrategyModel(small_workload(), train_step=forgets_to_return).fit(verbose=0)),  # type: ignore[arg-type]
    (r"workers=3 must hold .* such as \(1, 2, 3\)", ConfigError, lambda *_: ParameterServerStudy(workers=3)),  # type: ignore[arg-type]
    ("takes a cluster that is up, not Linear", UsageError, lambda m, _: ParameterServerStrategy(m)),
]  # fmt: skip


@pytest.mark.parametrize(("says", "kind", "call"), WRONG, ids=lambda value: str(value)[:20])
def test_what_stands_in_a_wrong_place_is_named(says: str, kind: type, call: Any, tmp_path: Path) -> None:
    with pytest.raises(kind, match=says):
        call(nn.Linear(3, 1), tmp_path)


def test_a_partitioner_is_a_function(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match=r"variable_partitioner=2 must be a function .* FixedShardsPartitioner\(2\)"):
        ParameterServerStrategy(cluster, variable_partitioner=2)  # type: ignore[arg-type]
