"""Functions sent to workers: results, structure, errors, cancellation, metrics (behaviours 15 to 28 and 42 to 46)."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.killed_programs import wait_until
from tests.parameter_server.conftest import MakeCluster, PlantedError, fail
from workbench.errors import UsageError
from workbench.parameter_server.context import check_cancelled, get_current_worker_index
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.coordinator.dispatch import START_DELAY_ENV, START_DELAY_MAX_ENV
from workbench.parameter_server.errors import CancelledError, ClosureInputError
from workbench.parameter_server.strategy import ParameterServerStrategy, compute_average_loss


class Pair(NamedTuple):
    left: Any
    right: Any


def spin(seconds: float = 30.0, end: str = "") -> None:
    """Compute for long, or until there is a file, looking up now and then."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not (end and Path(end).exists()):
        check_cancelled()
        time.sleep(0.005)


def test_a_strategy_has_one_coordinator_until_that_is_shut_down(strategy: ParameterServerStrategy) -> None:
    """Behaviour 15."""
    first = ClusterCoordinator(strategy)
    assert ClusterCoordinator(strategy) is first
    first.shutdown()
    with pytest.raises(UsageError, match="shut down"):
        first.schedule(int)
    second = ClusterCoordinator(strategy)
    assert second is not first
    assert second.schedule(int).fetch() == 0
    second.shutdown()
    with pytest.raises(UsageError, match="takes a wb.ps.Strategy, not NoneType"):
        ClusterCoordinator(None)  # type: ignore[arg-type]


def test_nested_results_keep_their_nesting_and_carry_no_graph(coordinator: ClusterCoordinator) -> None:
    """Behaviour 16."""

    def nested() -> Any:
        return {"a": (torch.ones(2, requires_grad=True) * 1, [1, "b"]), "c": Pair(torch.tensor(3.0), None)}

    value = coordinator.schedule(nested)
    for found in (value.fetch(), coordinator.fetch(value)):
        assert found["a"][0].tolist() == [1, 1]
        assert not found["a"][0].requires_grad
        assert found["a"][1] == [1, "b"]
        assert (type(found["c"]).__name__, float(found["c"].left)) == ("Pair", 3.0)
    several = coordinator.fetch({"x": [coordinator.schedule(int), 5], "y": (coordinator.schedule(str),)})
    assert several == {"x": [0, 5], "y": ("",)}


def test_join_without_work_and_again(coordinator: ClusterCoordinator) -> None:
    """Behaviour 17."""
    for _ in range(3):
        coordinator.join()
    coordinator.schedule(int)
    for _ in range(3):
        coordinator.join()
    assert coordinator.done()


def test_no_update_is_lost(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy) -> None:
    """Behaviours 18 and 21: inside and outside of the scope."""
    total = strategy.variable(0.0)
    for _ in range(5):
        coordinator.schedule(lambda: total.assign_add(2.0))
    with strategy.scope():
        for _ in range(5):
            coordinator.schedule(lambda: total.assign_add(2.0))
        coordinator.join()
    assert float(total) == 20.0


def test_what_cannot_be_scheduled_is_refused_at_once(coordinator: ClusterCoordinator) -> None:
    """Behaviours 19, 20."""
    value = coordinator.schedule(int)
    for args, kwargs in (([value], {}), ([], {"x": [value]})):
        with pytest.raises(UsageError, match="RemoteValue as an argument"):
            coordinator.schedule(print, args=args, kwargs=kwargs)
    with pytest.raises(TypeError, match="schedule takes a function"):
        coordinator.schedule("step")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="one entry an argument"):
        coordinator.schedule(print, args="ab")
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to a worker.*make what the function needs inside"):
        coordinator.schedule(lambda: [lambda: lock])
    with pytest.raises(TypeError, match=r"argument of type lock cannot be sent.*create_per_worker_dataset"):
        coordinator.schedule(int, args=({"x": (1, lock)},))


def test_a_dataset_that_cannot_be_sent_is_refused(coordinator: ClusterCoordinator) -> None:
    """Behaviour 20: functions are refused when they are scheduled, a dataset by who needs it."""
    lock = threading.Lock()
    iterators = iter(coordinator.create_per_worker_dataset(lambda: [lock]))
    coordinator.schedule(next, args=(iterators,))
    with pytest.raises(ClosureInputError, match="cannot be sent to a worker"):
        coordinator.join()


@pytest.mark.parametrize(
    "make", [threading.Lock, lambda: (each for each in "ab"), lambda: {"a": [np.array([threading.Lock()])]}]
)
def test_a_result_that_cannot_be_sent_is_refused(coordinator: ClusterCoordinator, make: Any) -> None:
    coordinator.schedule(make)
    with pytest.raises(
        TypeError, match=r"function returned cannot be sent to the coordinator: cannot pickle.*coordinator\.per_worker"
    ):
        coordinator.join()


@pytest.mark.parametrize("end", [sys.exit, lambda: sys.exit(0), lambda: (_ for _ in ()).throw(KeyboardInterrupt())])
def test_no_function_ends_the_coordinators_program(coordinator: ClusterCoordinator, end: Any) -> None:
    """Raised by join, exit(0) would end it as if all were well; in a dataset it ended the worker's thread, and all waited for ever."""
    coordinator.schedule(end)
    with pytest.raises(
        RuntimeError, match=r"(SystemExit|KeyboardInterrupt)\(.*\) on worker \d: a function that runs there returns"
    ):
        coordinator.join(60)
    coordinator.schedule(next, args=(iter(coordinator.create_per_worker_dataset(end)),))
    with pytest.raises(
        ClosureInputError, match=r"could not be built on worker \d: RuntimeError: (SystemExit|KeyboardInterrupt)"
    ):
        coordinator.join(60)
    value = coordinator.schedule(int)
    value.add_done_callback(end)
    coordinator.join(60)
    assert coordinator.schedule(int).fetch(60) == 0


def test_ragged_batches_travel(coordinator: ClusterCoordinator) -> None:
    """To a worker and back: packed sequences and nested tensors."""
    sequences = [torch.arange(3.0), torch.ones(2)]
    packed = nn.utils.rnn.pack_sequence(sequences)
    nested = torch.nested.nested_tensor(sequences, layout=torch.jagged)
    found, back = coordinator.schedule(lambda *given: given, args=(packed, nested)).fetch()
    assert torch.equal(found.data, packed.data)
    assert torch.equal(found.batch_sizes, packed.batch_sizes)
    assert all(map(torch.equal, back.unbind(), sequences))


def test_what_a_function_takes_along_is_sent_with_it(coordinator: ClusterCoordinator) -> None:
    """What names itself, classes and modules made here, loggers and layers: neither engine refuses them."""

    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    class Scaled(torch.nn.Module):
        layer = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * factorial(3)

    scaled, log = Scaled().eval(), logging.getLogger("of a test")
    value = coordinator.schedule(lambda x: (scaled(x).shape, log.name, math.factorial(3)), args=(torch.ones(4, 2),))
    assert value.fetch() == ((4, 1), "of a test", 6)


def test_run_and_reduce(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy) -> None:
    """Behaviours 21, 22, T5.3, T5.10: a worker has one replica, whose sum is its own; outside of a function both warn."""

    def step(x: torch.Tensor) -> Any:
        rows = strategy.run(lambda given, axis: given.sum(axis), args=(x,), kwargs={"axis": 1})
        return rows, strategy.reduce("SUM", rows), strategy.reduce("mean", rows, axis=0), strategy.num_workers  # type: ignore[arg-type]

    x = torch.arange(6.0).view(2, 3)
    with strategy.scope():
        inside = coordinator.schedule(step, args=(x,))
    for value in (inside, coordinator.schedule(step, args=(x,))):
        rows, total, mean, workers = value.fetch()
        assert rows.tolist() == total.tolist() == [3.0, 12.0]
        assert (float(mean), workers) == (7.5, 3)
    with pytest.warns(UserWarning, match="runs on the coordinator"):
        assert strategy.run(int) == 0
    with pytest.warns(UserWarning, match="runs on the coordinator"):
        assert float(strategy.reduce("sum", torch.ones(3), axis=0)) == 3.0
    with pytest.raises(UsageError, match="op='max'"):
        strategy.reduce("max", torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(
        AttributeError,
        match=r"no 'experimental_local_results': a worker has one replica, on the CPU.* start more workers",
    ):
        strategy.experimental_local_results  # type: ignore[attr-defined]  # noqa: B018
    assert strategy.num_replicas_in_sync == 1


A, B = [1.0, 2.0, 4.0], [[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]]


@pytest.mark.parametrize(
    ("losses", "weights", "size", "theirs"),
    [
        (A, None, None, 7 / 3), (A, None, 8, 0.875), (A, [1.0, 0.5, 0.25], None, 1.0), (A, [[1.0], [0.5], [0.25]], None, 1.0),
        (A, [1, 2, 3], None, 17 / 3), (A, 2.0, None, 14 / 3), (B, None, None, 21.0), (B, [1.0, 0.5, 0.25], 12, 1.75),
        (B, [[1.0], [0.5], [0.25]], None, 7.0), (B, [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], None, 19.0), ([], None, 4, 0.0),
    ],
)  # fmt: skip
def test_the_average_loss_is_tensorflows(losses: Any, weights: Any, size: int | None, theirs: float) -> None:
    """T5.9: values of TensorFlow 2.21."""
    assert float(compute_average_loss(torch.tensor(losses), weights, size)) == pytest.approx(theirs, rel=1e-6)


def test_the_shares_of_a_batch_add_up_to_the_whole(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy
) -> None:
    """T5.9: of unequal size, one of them empty; loss and gradient, where means of means are wrong."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(8, generator=generator), torch.rand(8, generator=generator)

    def share(x: torch.Tensor, w: torch.Tensor) -> Any:
        slope = torch.tensor(0.5, requires_grad=True)
        loss = compute_average_loss((slope * x - 1) ** 2, w, 8)
        loss.backward()
        return loss, slope.grad

    parts = zip(x.split([5, 3, 0]), w.split([5, 3, 0]), strict=True)
    loss, grad = (
        sum(each)
        for each in zip(*coordinator.fetch([coordinator.schedule(share, part) for part in parts]), strict=True)
    )
    torch.testing.assert_close(loss, (w * (0.5 * x - 1) ** 2).mean())
    torch.testing.assert_close(grad, (w * 2 * (0.5 * x - 1) * x).mean())


@pytest.mark.parametrize(
    ("losses", "weights", "size", "says"),
    [
        (torch.tensor(1.0), None, None, "one loss an example: reduction='none'"),
        (torch.ones(3), [1.0, 2.0], None, r"sample_weight of shape \(2,\) does not go with losses of shape \(3,\)"),
        (torch.ones(3), None, 0, "global_batch_size=0 must be an integer of at least 1"),
    ],
)
def test_losses_that_cannot_be_averaged_are_named(losses: Any, weights: Any, size: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        compute_average_loss(losses, weights, size)


@pytest.mark.parametrize(("made", "given"), [("variable", (1.0,)), ("place", (None, None))])
def test_what_is_on_servers_is_made_on_the_coordinator(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, made: str, given: Any
) -> None:
    coordinator.schedule(lambda: getattr(strategy, made)(*given))
    with pytest.raises(UsageError, match=r"A scheduled function made a .* give it as an argument"):
        coordinator.join()


def never_looks(begun: Any) -> None:
    begun.assign_add(1.0)
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        time.sleep(0.005)
    begun.assign_add(100.0)


def test_a_function_that_never_looks_is_cut_off(own_cluster: MakeCluster) -> None:
    """Behaviours 45, 46: its worker is another one afterwards, and what it still writes is thrown away."""
    cluster = own_cluster(2, 1)
    cluster.engine.grace_s = 0.3  # type: ignore[attr-defined]
    strategy = ParameterServerStrategy(cluster)
    coordinator = ClusterCoordinator(strategy)
    begun, before = strategy.variable(0.0), sum(cluster.engine.incarnation("worker", k) for k in range(2))
    iterators = iter(coordinator.create_per_worker_dataset(itertools.count))
    value = coordinator.schedule(never_looks, args=(begun,))
    while float(begun) < 1:
        time.sleep(0.005)
    coordinator.schedule(fail)
    with pytest.raises(PlantedError):
        coordinator.join()
    with pytest.raises(CancelledError):
        value.fetch(0)
    coordinator.fetch([coordinator.schedule(next, args=(iterators,)) for _ in range(6)])
    wait_until(lambda: [cluster.engine.check("worker", k) for k in range(2)] == [None, None])
    wait_until(lambda: sum(cluster.engine.incarnation("worker", k) for k in range(2)) == before + 1)
    if cluster.engine.name == "threads":
        time.sleep(5.5)  # until it comes to its second write
    assert float(begun) == 1
    coordinator.shutdown()


def test_done_is_asked_meanwhile(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy) -> None:
    """T6.8: it does not wait; reading and writing variables goes on while functions run."""
    go, made = strategy.variable(0.0), strategy.variable(0.0)

    def work() -> None:
        made.assign_add(1.0)
        while not float(go):
            time.sleep(0.005)

    for _ in range(5):
        coordinator.schedule(work)
    while float(made) < 3:
        assert not coordinator.done()
    assert not coordinator.done()
    go.assign(1.0)
    while not coordinator.done():
        time.sleep(0.005)
    assert float(made) == 5.0


def test_whoever_is_free_takes_the_next(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy) -> None:
    """T1.2, T6.2: one worker does not come to an end before the others have done everything else."""
    others, first = strategy.variable(0.0), strategy.variable(0.0)

    def work(last: bool) -> int:
        if last:
            first.assign(1.0)
        while last and float(others) < 20:
            time.sleep(0.005)
        if not last:
            others.assign_add(1.0)
        return get_current_worker_index()

    slow = coordinator.schedule(work, args=(True,))
    while float(first) == 0:
        time.sleep(0.005)
    quick = coordinator.fetch([coordinator.schedule(work, args=(False,)) for _ in range(20)])
    assert slow.fetch() not in set(quick)


def test_schedule_returns_at_once_and_a_worker_does_one_thing_at_a_time(coordinator: ClusterCoordinator) -> None:
    """Behaviours 23, 25 and T6.1; the dataset function's index is in test_per_worker.py."""

    def timed() -> tuple[int, float, float]:
        begun = time.monotonic()
        time.sleep(0.05)
        return get_current_worker_index(), begun, time.monotonic()

    begun = time.monotonic()
    values = [coordinator.schedule(timed) for _ in range(9)]
    assert time.monotonic() - begun < 0.05
    assert not all(value.done() for value in values)
    rows = coordinator.fetch(values)
    assert {row[0] for row in rows} <= {0, 1, 2}
    for worker in {row[0] for row in rows}:
        spans = sorted((begin, end) for index, begin, end in rows if index == worker)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    with pytest.raises(RuntimeError, match="outside of a worker"):
        get_current_worker_index()


@pytest.mark.parametrize(("most", "workers"), [("60", {0}), ("0", {0, 1, 2})])
def test_workers_may_begin_one_after_the_other(
    strategy: ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch, most: str, workers: set[int]
) -> None:
    """Behaviour 24."""
    monkeypatch.setenv(START_DELAY_ENV, "30")
    monkeypatch.setenv(START_DELAY_MAX_ENV, most)
    coordinator = ClusterCoordinator(strategy)

    def slow() -> int:
        time.sleep(0.05)
        return get_current_worker_index()

    assert set(coordinator.fetch([coordinator.schedule(slow) for _ in range(9)])) == workers
    coordinator.shutdown()


@pytest.mark.parametrize("given", ["soon", "-1", "nan", "inf", ""])
def test_a_delay_that_is_none_is_told_before_a_thread_dies_of_it(
    strategy: ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv(START_DELAY_ENV, given)
    with pytest.raises(UsageError, match=f"WORKBENCH_PS_START_DELAY_S='{given}' must be a number of seconds"):
        ClusterCoordinator(strategy)


def test_metrics(coordinator: ClusterCoordinator) -> None:
    """Behaviour 27."""
    coordinator.fetch([coordinator.schedule(int), coordinator.schedule(int)])
    coordinator.schedule(fail)
    with pytest.raises(PlantedError):
        coordinator.join()
    found = coordinator.metrics()
    names = ("closures_executed", "closures_failed", "remote_value_fetch", "queued", "in_flight", "worker_failures")
    assert [found[name] for name in names] == [2, 1, 2, 0, 0, 0]
    assert sum(found["closures"].values()) == 3


def test_a_coordinator_that_nobody_holds_leaves_no_thread(strategy: ParameterServerStrategy) -> None:
    """Behaviour 28."""
    before = set(threading.enumerate())
    coordinator = ClusterCoordinator(strategy)
    coordinator.schedule(int)
    coordinator.join()
    assert len(set(threading.enumerate()) - before) >= strategy.num_workers
    del coordinator
    gc.collect()
    until = time.monotonic() + 5.0
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_an_error_is_raised_by_its_type_then_cleared(coordinator: ClusterCoordinator) -> None:
    """Behaviours 42, 44, T12.3."""
    for message in ("first", "second"):
        for _ in range(3):
            coordinator.schedule(int)
        coordinator.schedule(fail, args=(message,))
        with pytest.raises(PlantedError, match=message):
            coordinator.join()
        coordinator.join()
        assert coordinator.schedule(int).fetch() == 0


def test_schedule_raises_it_sooner_or_later(coordinator: ClusterCoordinator) -> None:
    """Behaviour 43, also where several have failed."""
    for _ in range(2):
        coordinator.schedule(fail)
    with pytest.raises(PlantedError):  # noqa: PT012
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            coordinator.schedule(int)
            time.sleep(0.001)
    coordinator.join()


def test_what_runs_is_stopped_when_another_fails(coordinator: ClusterCoordinator) -> None:
    """Behaviour 45: the cluster is usable afterwards."""
    long = coordinator.schedule(spin)
    time.sleep(0.1)
    coordinator.schedule(fail)
    begun = time.monotonic()
    with pytest.raises(PlantedError):
        coordinator.join()
    assert time.monotonic() - begun < 10.0
    with pytest.raises(CancelledError):
        long.fetch(0)
    assert coordinator.fetch([coordinator.schedule(int) for _ in range(6)]) == [0] * 6


def test_nothing_runs_when_an_error_is_raised(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy
) -> None:
    """Behaviour 46, on the case that was measured: 20 good, 1 bad, 200 good."""
    count = strategy.variable(0.0)

    def good() -> None:
        time.sleep(0.002)
        count.assign_add(1.0)

    values = [coordinator.schedule(good) for _ in range(20)]
    coordinator.schedule(fail)
    with pytest.raises(PlantedError):  # noqa: PT012
        for _ in range(200):
            values.append(coordinator.schedule(good))
        coordinator.join()
    at_once = float(count)
    time.sleep(0.05)
    assert float(count) == at_once
    cancelled = 0
    for value in values:
        try:
            value.fetch(0)
        except CancelledError:
            cancelled += 1
    assert cancelled > 0
    assert len(values) - cancelled <= at_once <= len(values) - cancelled + strategy.num_workers
    coordinator.join()


def test_join_may_be_given_up(coordinator: ClusterCoordinator) -> None:
    coordinator.schedule(spin, args=(0.3,))
    with pytest.raises(TimeoutError, match="1 run"):
        coordinator.join(timeout_s=0.05)
    coordinator.join()


def test_a_stall_is_told_with_stacks(
    strategy: ParameterServerStrategy, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Behaviour 26: again and again while it lasts, whatever the callback raises; never while closures end, or there is nothing to do."""
    stalls: list[float] = []
    end = tmp_path / "end"

    def on_stall() -> None:
        stalls.append(time.monotonic())
        if len(stalls) == 2:
            end.touch()
        raise PlantedError

    coordinator = ClusterCoordinator(strategy, watchdog_s=0.3, on_stall=on_stall)
    time.sleep(0.7)
    for _ in range(8):
        coordinator.schedule(time.sleep, args=(0.05,)).fetch()
    assert not stalls
    coordinator.schedule(spin, args=(30.0, str(end)))
    coordinator.join()
    assert "No closure finished for 0.3 s" in caplog.text
    assert "worker 0 of the coordinator" in caplog.text
    assert "it goes on watching" in caplog.text
    assert stalls[1] - stalls[0] > 0.25
    time.sleep(0.4)  # a look that began before the closure ended may still tell
    told = len(stalls)
    assert told >= 2
    time.sleep(0.7)
    assert len(stalls) == told
    coordinator.shutdown()


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), True])
def test_a_watchdog_needs_a_time(strategy: ParameterServerStrategy, seconds: float) -> None:
    with pytest.raises(UsageError, match="must be a finite number above 0"):
        ClusterCoordinator(strategy, watchdog_s=seconds)
