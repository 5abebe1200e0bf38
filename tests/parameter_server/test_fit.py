"""Path A: fit, on a cluster and in this process by one argument (T4, T14.8 to T14.13, behaviours 80 to 84)."""

from __future__ import annotations

import functools
import gc
import random
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from tests.helpers.held import held
from tests.helpers.killed_programs import sigkill
from tests.helpers.workloads import small_workload, squared
from tests.parameter_server.conftest import MakeCluster
from workbench.errors import DataError, UsageError, WorkloadError
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.context import get_current_worker_index
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.data.datasets import DatasetCreator, InputContext
from workbench.parameter_server.servers import links as planes
from workbench.parameter_server.servers import replicas
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.callbacks import Callback
from workbench.parameter_server.training.steps import AdditiveMetric, Stepped
from workbench.parameter_server.training.strategy_model import StrategyModel
from workbench.train.batches import train_batches
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload

CPU = torch.device("cpu")


class PlantedError(Exception):
    """What a user's train step raises."""


class Seen(Callback):
    """Writes down what it is told."""

    def __init__(self, every_steps: int = 1) -> None:
        self.every_steps = every_steps
        self.steps: list[int] = []
        self.events: list[str] = []

    def on_train_begin(self) -> None:
        self.events.append("begin")

    def on_epoch_begin(self, epoch: int) -> None:
        self.events.append(f"epoch {epoch}")

    def on_train_batch_end(self, step: int, logs: Any) -> None:
        self.steps.append(step)
        assert set(logs) >= {"loss", "close"}

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.events.append(f"end {epoch}")

    def on_train_end(self) -> None:
        self.events.append("end")


class Unending(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(3), torch.zeros(())


def one_batch(outputs: Any, batch: Any, weights: torch.Tensor) -> torch.Tensor:
    return torch.ones(())


def visited(outputs: Any, batch: Any, weights: torch.Tensor) -> torch.Tensor:
    """How often each of 48 examples was seen, by the id that it carries as its first input."""
    return torch.bincount(batch[0][:, 0].round().long(), minlength=48)


def spread(counts: torch.Tensor) -> float:
    """1 where each was seen exactly once."""
    return float(counts.min()) if counts.min() == counts.max() else float("nan")


BATCHES = AdditiveMetric(one_batch, float)
VISITS = AdditiveMetric(visited, spread)


def numbered() -> TensorDataset:
    x = torch.arange(48.0, dtype=torch.float64)[:, None].expand(48, 3).contiguous()
    return TensorDataset(x, torch.sin(x.sum(1)))


def torch_twin(workload: Workload, steps: int) -> tuple[nn.Module, list[float]]:
    """The same training with torch's own optimizer, one step after the other."""
    config = workload.config
    model = build_model(workload, config, CPU).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.peak_lr, momentum=config.momentum)
    batches, losses = train_batches(workload, config, CPU), []
    for _ in range(steps):
        ((batch, _),) = next(batches)
        optimizer.zero_grad()
        loss = squared(model(batch[0]), batch).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def test_in_this_process_it_is_plain_training() -> None:
    """T4.2: without a strategy, fit is what torch's own loop does with the same batches."""
    workload = small_workload()
    model = StrategyModel(workload)
    history = model.fit(epochs=3, verbose=0)
    twin, losses = torch_twin(workload, 18)
    torch.testing.assert_close(flat(model.module()), flat(twin), rtol=1e-12, atol=1e-14)
    expected = [sum(losses[6 * k : 6 * k + 6]) / 6 for k in range(3)]
    assert history.history["loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("steps_per_execution", [1, 4, "auto"])
def test_one_worker_trains_as_this_process_does(lone_cluster: Cluster, steps_per_execution: Any) -> None:
    """T4.2, T13.7: the strategy and the steps in a function change how fast it is, not what comes out."""
    workload = small_workload(config={"optimizer": "adam", "max_grad_norm": 0.5})
    strategy = ParameterServerStrategy(lone_cluster, variable_partitioner=FixedShardsPartitioner(2))
    found = [StrategyModel(workload, each) for each in (None, strategy)]
    histories = [
        each.fit(epochs=2, steps_per_epoch=7, steps_per_execution=steps_per_execution, verbose=0) for each in found
    ]
    torch.testing.assert_close(flat(found[1].module()), flat(found[0].module()), rtol=1e-12, atol=1e-14)
    for name, values in histories[0].history.items():
        assert histories[1].history[name] == pytest.approx(values, rel=1e-12), name


@pytest.mark.parametrize("steps_per_execution", [1, 3, 10, "auto"])
def test_steps_count_exactly(strategy: ParameterServerStrategy, steps_per_execution: Any) -> None:
    """Behaviours 80 and 84: 100 updates, and each epoch counts each of its batches, also at its border."""
    model = StrategyModel(small_workload(), strategy, metrics={"batches": BATCHES})
    history = model.fit(epochs=10, steps_per_epoch=10, steps_per_execution=steps_per_execution, verbose=0)
    assert model.steps == 100
    assert history.epoch == list(range(10))
    assert history.history["batches"] == [10.0] * 10
    assert history.history["val_batches"] == [1.0] * 10


def test_each_example_once_although_a_worker_dies_on_the_way(own_cluster: MakeCluster) -> None:
    """T14.15, T6.3, T6.4: its steps are taken over, applied once and counted once; it comes back in the next epoch."""
    cluster = own_cluster(3, 2)

    class Kill(Callback):
        def on_train_batch_end(self, step: int, logs: Any) -> None:
            if len(done) == 5:
                cluster.engine.kill("worker", 1)
            done.append(step)

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            if epoch == 0:
                cluster.engine.restart("worker", 1)

    done: list[int] = []
    data = small_workload(train_data=numbered(), metrics={}, config={"batch_size": 2})
    model = StrategyModel(data, ParameterServerStrategy(cluster), metrics={"visits": VISITS})
    history = model.fit(epochs=2, verbose=0, callbacks=[Kill()], validation_data=numbered())
    assert history.history["visits"] == [1.0, 1.0]
    assert history.history["val_visits"] == [1.0, 1.0]
    assert sorted(done) == list(range(48))
    assert model.steps == 48


KILLS = 50


def random_kills(cluster: Cluster, coordinator: ClusterCoordinator, over: threading.Event) -> None:
    """SIGKILL for a worker that is at work, `KILLS` times, each at a random moment.

    Processes come back by themselves, as Ray has it; a thread that is cut off is started again after a random pause.
    """
    dice, engine = random.Random(0), cluster.engine
    for _ in range(KILLS):
        worker = dice.randrange(cluster.num_workers)
        ended = functools.partial(lambda of: coordinator.metrics()["closures"].get(of, 0), worker)
        enough, failures = ended() + dice.randint(1, 4), coordinator.metrics()["worker_failures"]
        while ended() < enough and not over.wait(0.001):  # it is back, and in the midst of its work
            pass
        time.sleep(dice.uniform(0.0, 0.01))
        sigkill(engine, "worker", worker)
        if engine.name == "threads":
            time.sleep(dice.uniform(0.0, 0.02))
            engine.restart("worker", worker)
        while coordinator.metrics()["worker_failures"] == failures and not over.wait(0.001):
            pass


@pytest.mark.nightly
def test_fifty_random_kills_change_no_count(own_cluster: MakeCluster) -> None:
    """T10.1, T14.15, P1: one run, in which workers die at random moments; updates, writes, batches and examples stay exact.

    It ends within the time in which the kills could follow each other: each is noticed and its worker is back before the next
    one, which the coordinator measures. Three times as long is allowed, for the steps between and for what else the machine does.
    """
    cluster = own_cluster(3, 2)
    strategy = ParameterServerStrategy(cluster)
    coordinator = ClusterCoordinator(strategy)
    written = strategy.variable(0.0)

    def step(placed: PlacedModule, batch: Any, workload: Workload) -> Stepped:
        written.assign_add(1.0)
        return own_step(placed, batch, workload)

    config = {"batch_size": 2, "optimizer": "sgd", "peak_lr": 0.0005}
    data = small_workload(train_data=numbered(), metrics={}, config=config)
    model = StrategyModel(data, strategy, metrics={"visits": VISITS, "batches": BATCHES}, train_step=step)
    over, ended = threading.Event(), []
    chaos = threading.Thread(target=random_kills, args=(cluster, coordinator, over))

    class Until(Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.model.stop_training = over.is_set() or not chaos.is_alive()

    def train() -> None:
        ended.append(model.fit(epochs=10**6, verbose=0, validation_data=numbered(), callbacks=[Until()]))

    training, begun = threading.Thread(target=train, daemon=True), time.monotonic()
    chaos.start()
    training.start()
    try:
        while training.is_alive():  # from outside: a training that hangs calls nothing back
            training.join(0.1)
            report = coordinator.metrics()
            once = statistics.mean([1.0, *report["recovery_s"]])
            assert time.monotonic() - begun < 3 * (KILLS + 1) * max(1.0, once), report
    finally:
        over.set()
        chaos.join()
    (history,) = ended
    epochs = len(history.epoch)
    assert history.history["batches"] == [24.0] * epochs
    assert history.history["visits"] == history.history["val_visits"] == [1.0] * epochs
    assert model.steps == float(written) == 24 * epochs
    assert coordinator.metrics()["worker_failures"] >= KILLS


def test_hooks_at_every_step_in_order_of_completion(lone_cluster: Cluster, strategy: ParameterServerStrategy) -> None:
    """T14.9, behaviour 82: what the source forbids: each step once; with one worker in the order in which they were scheduled."""
    for chosen in (strategy, ParameterServerStrategy(lone_cluster), None):
        seen, sampled = Seen(), Seen(every_steps=4)
        model = StrategyModel(small_workload(), chosen)
        model.fit(epochs=2, steps_per_epoch=10, steps_per_execution=3, callbacks=[seen, sampled], verbose=0)
        assert sorted(seen.steps) == list(range(20))
        if chosen is not strategy:
            assert seen.steps == list(range(20))
        assert sampled.steps == [seen.steps[k] for k in (3, 7, 13, 17)]
        assert seen.events == ["begin", "epoch 0", "end 0", "epoch 1", "end 1", "end"]


def test_a_hook_at_the_beginning_of_a_step_is_refused() -> None:
    """Behaviour 82: steps begin on the workers, several at a time."""

    class Early(Callback):
        def on_train_batch_begin(self, step: int) -> None: ...

    class Typo(Callback):
        def on_epoch_ends(self, epoch: int) -> None: ...

    model = StrategyModel(small_workload())
    with pytest.raises(UsageError, match="never called. Steps begin on the workers"):
        model.fit(callbacks=[Early()])
    with pytest.raises(UsageError, match="Did you mean 'on_epoch_end'"):
        model.fit(callbacks=[Typo()])
    with pytest.raises(UsageError, match="callbacks has int"):
        model.fit(callbacks=[3])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="every_steps=0"):
        model.fit(callbacks=[Seen(0)])


def test_a_callback_sees_the_evaluation_and_changes_the_next_epoch(strategy: ParameterServerStrategy) -> None:
    """T8.2: between two epochs nothing runs; the hook takes the learning rate away, then ends training."""

    class Change(Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            seen.append((logs["val_loss"], flat(self.model.module())))
            if epoch == 0:
                self.model.set_peak_lr(1e-12)
            self.model.stop_training = epoch == 1

    seen: list[tuple[float, torch.Tensor]] = []
    model = StrategyModel(small_workload(config={"optimizer": "sgd"}), strategy)
    before = flat(model.module())
    model.fit(epochs=5, callbacks=[Change()], verbose=0)
    assert len(seen) == 2
    assert (seen[0][1] - before).abs().max() > 1e-3
    torch.testing.assert_close(seen[1][1], seen[0][1], rtol=0, atol=1e-9)
    assert model.steps == 12
    with pytest.raises(UsageError, match="place the module anew"):
        model.placed.reconfigure(model.config.replace(optimizer="adam"))


def own_step(placed: PlacedModule, batch: Any, workload: Workload) -> Stepped:
    """Descends on twice the loss."""
    with placed.step() as module:
        outputs = workload.forward(module, batch)
        losses = 2 * workload.loss(outputs, batch)
        losses.mean().backward()
    return Stepped(outputs, losses)


def failing_step(placed: PlacedModule, batch: Any, workload: Workload) -> Stepped:
    raise PlantedError("in the step")


@pytest.mark.parametrize("local", [True, False])
def test_a_train_step_of_ones_own(strategy: ParameterServerStrategy, local: bool) -> None:
    """T4.1: a function, no subclass. Twice the loss is twice the lr for plain SGD."""
    workload = small_workload(config={"optimizer": "sgd", "batch_size": 48})
    chosen = None if local else strategy
    doubled = StrategyModel(workload, chosen, train_step=own_step)
    twin = StrategyModel(workload.replace(config=workload.config.replace(peak_lr=0.1)))
    for model in (doubled, twin):
        model.fit(epochs=1, steps_per_epoch=1, verbose=0)
    torch.testing.assert_close(flat(doubled.module()), flat(twin.module()), rtol=1e-12, atol=1e-14)


def test_an_error_in_a_step_is_raised_once_and_the_model_goes_on(strategy: ParameterServerStrategy) -> None:
    """T12.1, T14.12: the user's own error; nothing runs any more, and the same cluster trains the next model."""
    with pytest.raises(PlantedError, match="in the step") as raised:
        StrategyModel(small_workload(), strategy, train_step=failing_step).fit(verbose=0)
    assert "failing_step" in "".join(str(entry) for entry in raised.traceback) + str(raised.value.__cause__)
    good = StrategyModel(small_workload(), strategy)
    good.fit(verbose=0)
    assert good.steps == 6


def test_an_error_in_a_callback_leaves_nothing_running(strategy: ParameterServerStrategy) -> None:
    """Behaviour 46, of fit."""

    class Bad(Callback):
        def on_train_batch_end(self, step: int, logs: Any) -> None:
            raise PlantedError("in the callback")

    model = StrategyModel(small_workload(), strategy)
    with pytest.raises(PlantedError, match="in the callback"):
        model.fit(steps_per_epoch=500, callbacks=[Bad()], verbose=0)
    at_once = model.steps
    time.sleep(0.05)
    assert model.steps == at_once < 500
    assert model.history.epoch == []


def test_fit_and_the_user_share_a_coordinator(strategy: ParameterServerStrategy) -> None:
    """T4.13, behaviour 83: functions of the user's run on the workers beside fit."""
    coordinator = ClusterCoordinator(strategy)

    class Beside(Callback):
        def on_train_batch_end(self, step: int, logs: Any) -> None:
            values.append(coordinator.schedule(get_current_worker_index))

    values: list[Any] = []
    model = StrategyModel(small_workload(), strategy)
    model.fit(callbacks=[Beside()], verbose=0)
    assert ClusterCoordinator(strategy) is coordinator
    assert set(coordinator.fetch(values)) <= {0, 1, 2}
    assert len(values) == model.steps == 6


def test_a_dataset_function_runs_on_every_worker(strategy: ParameterServerStrategy) -> None:
    """T4.3, T4.5, T4.6, T4.12, behaviour 31: the source's example; each worker makes its own data, once, and knows which it is."""
    calls = strategy.variable(torch.zeros(3))

    def dataset_fn(context: InputContext) -> Any:
        assert context.num_input_pipelines == 3
        assert context.input_pipeline_id == get_current_worker_index()
        calls.assign_add(torch.eye(3)[context.input_pipeline_id])
        size = context.get_per_replica_batch_size(64)
        generator = torch.Generator().manual_seed(context.input_pipeline_id)
        x = torch.rand(640, 10, generator=generator)
        return torch.utils.data.DataLoader(TensorDataset(x, x.mean(1)), batch_size=size, shuffle=True)

    workload = small_workload(
        build_model=lambda: nn.Linear(10, 1),
        config={"optimizer": "sgd", "batch_size": 64, "peak_lr": 0.05, "precision": "float32"},
    )
    model = StrategyModel(workload, strategy)
    history = model.fit(DatasetCreator(dataset_fn), epochs=5, steps_per_epoch=20, steps_per_execution=10, verbose=0)
    assert calls.read().tolist() == [1.0, 1.0, 1.0]
    assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]
    assert "val_loss" not in history.history
    assert model.steps == 100


def test_a_missing_length_is_an_error_that_says_why(strategy: ParameterServerStrategy) -> None:
    """T4.4, behaviour 81."""
    model = StrategyModel(small_workload(), strategy)
    for data in (DatasetCreator(lambda context: []), lambda: [], (batch for batch in ())):
        expected = "steps_per_epoch is missing: a function" if callable(data) else "iterator that is under way"
        with pytest.raises(UsageError, match=expected):
            model.fit(data)
    for name, value in (("steps_per_epoch", -1), ("steps_per_epoch", 0), ("epochs", 0), ("steps_per_execution", 1.5), ("validation_freq", 0)):  # fmt: skip
        with pytest.raises(UsageError, match=f"{name}={value}"):
            model.fit(**{name: value})
    with pytest.raises(UsageError, match="validation_steps|steps=, which counts"):
        model.fit(validation_data=Unending())
    assert model.steps == 0
    with pytest.raises(UsageError, match="verbose=3"):
        model.fit(verbose=3)  # type: ignore[arg-type]


def test_two_strategies_on_one_cluster_do_not_disturb_each_other(lone_cluster: Cluster) -> None:
    """Each has its coordinator; what one lets its workers hold, or forget, is not the other's."""
    workload = small_workload()
    models = [StrategyModel(workload, each and ParameterServerStrategy(lone_cluster)) for each in (True, True, None)]
    for _ in range(2):
        for model in models:
            model.fit(steps_per_epoch=3, verbose=0)
        gc.collect()
    for model in models[:2]:
        torch.testing.assert_close(flat(model.module()), flat(models[2].module()), rtol=1e-12, atol=1e-14)


def test_what_fit_gave_the_workers_is_forgotten_afterwards(lone_cluster: Cluster) -> None:
    """Behaviour 36: the runner stays, as long as the model; datasets go with the call."""
    gc.collect()
    strategy = ParameterServerStrategy(lone_cluster)
    (before,) = held(ClusterCoordinator(strategy))
    model = StrategyModel(small_workload(), strategy)
    for _ in range(3):
        model.fit(steps_per_epoch=3, verbose=0)
        model.predict(torch.zeros(5, 3, dtype=torch.float64))
    gc.collect()
    assert held(ClusterCoordinator(strategy)) == [before + 1]


def test_the_gradient_is_that_of_the_weighted_mean(strategy: ParameterServerStrategy) -> None:
    """One update with the full batch, by hand."""
    fields = {"optimizer": "sgd", "batch_size": 48, "peak_lr": 0.5}
    small = small_workload(weights=lambda batch: batch[0][:, 0].square(), config=fields)
    for where in (None, strategy):
        model = StrategyModel(small, where)
        expected = model.module()
        history = model.fit(epochs=1, verbose=0)
        x, y = (column.double() for column in small.train_data.tensors)
        weights = x[:, 0].square()
        loss = (weights * squared(expected(x), (x, y))).sum() / weights.sum()
        loss.backward()
        for parameter, found in zip(expected.parameters(), model.module().parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(found, parameter - 0.5 * parameter.grad)
        assert history.history["loss"] == [pytest.approx(loss.item())]
    padding = small_workload(weights=lambda batch: 0 * batch[1])
    with pytest.raises(WorkloadError, match="gives 0 to all 8 examples of the batch of a step"):
        StrategyModel(padding).fit(verbose=0)


def test_a_model_of_this_process_leaves_nothing_behind() -> None:
    """Its values live as long as the placed module, and no longer."""
    placed = StrategyModel(small_workload()).placed
    with placed.step() as module:
        module(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert placed.steps == 1
    identity = placed.cluster
    assert identity in planes._PLANES
    del placed, module
    gc.collect()
    assert identity not in planes._PLANES
    assert not [key for key in replicas._REPLICAS if key[0] == identity]


def test_ten_outputs_against_one_target_are_refused(strategy: ParameterServerStrategy) -> None:
    """T4.7: the source's example subtracts (64,) from (64, 10) and trains on it silently."""
    workload = small_workload(
        build_model=lambda: nn.Linear(3, 8), loss=lambda outputs, batch: (outputs - batch[1]) ** 2
    )
    for chosen in (None, strategy):
        with pytest.raises(WorkloadError, match="one value per example"):
            StrategyModel(workload, chosen).fit(verbose=0)


def test_what_servers_cannot_do_is_refused_at_once() -> None:
    small = small_workload()
    with pytest.raises(UsageError, match="is a factory"):
        StrategyModel(small, config=small.config.replace(optimizer=torch.optim.SGD))
    with pytest.raises(UsageError, match="accumulate_steps=2 must be 1"):
        StrategyModel(small, config=small.config.replace(accumulate_steps=2))
    with pytest.raises(UsageError, match="no wb.ps.Strategy"):
        StrategyModel(small, "local")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="train_step=3"):
        StrategyModel(small, train_step=3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="batch_size=49 is more than the 48"):
        StrategyModel(small).fit(batch_size=49)


def test_verbosity(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """T14.10, behaviour 82: a line an epoch by default; a bar that moves during the epoch is allowed."""
    model = StrategyModel(small_workload())
    for verbose, lines in ((0, 0), (1, 0), (2, 2)):
        model.fit(epochs=2, verbose=verbose)  # type: ignore[arg-type]
        assert len(capsys.readouterr().out.splitlines()) == lines
    model.fit(epochs=1)
    assert capsys.readouterr().out.startswith("epoch 1/1: 6 steps, loss ")
    monkeypatch.delenv("WORKBENCH_LIVE", raising=False)
    StrategyModel(small_workload(), train_step=slow_step).fit(steps_per_epoch=6, verbose=1)
    said = capsys.readouterr().err
    assert "epoch 1/1" in said
    assert any(f" {done}/6 " in said for done in range(1, 6)), said


def slow_step(placed: PlacedModule, batch: Any, workload: Workload) -> Stepped:
    time.sleep(0.06)
    return own_step(placed, batch, workload)


def test_batch_norm_statistics_reach_the_coordinator(lone_cluster: Cluster, strategy: ParameterServerStrategy) -> None:
    """Each worker has its own; evaluation uses their mean. One worker's are those of plain training."""
    net = lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))  # noqa: E731
    workload = small_workload(build_model=net)
    twin, _ = torch_twin(workload, 12)
    for chosen in (None, ParameterServerStrategy(lone_cluster)):
        model = StrategyModel(workload, chosen)
        model.fit(epochs=2, verbose=0)
        for (name, found), expected in zip(model.module().named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=name)
    first = lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))  # noqa: E731
    model = StrategyModel(small_workload(build_model=first, config={"optimizer": "sgd"}), strategy)
    model.fit(epochs=10, verbose=0)
    assert model.evaluate() == pytest.approx(model.evaluate(where="coordinator"), rel=1e-12)
    x = model.workload.train_data.tensors[0].double()
    found, bound = model.module()[0], 4 * x.std(0) / 8**0.5
    assert (found.running_mean - x.mean(0)).abs().lt(bound).all(), "the mean of batches of 8"
    assert found.running_mean.abs().max() > 0
    assert 1 <= int(found.num_batches_tracked) <= 60
