"""The study's numbers are those of what it ran; three planted bottlenecks, three verdicts; each remedy against its closed form."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from tests.helpers.workloads import small_workload
from workbench.config import TrainConfig
from workbench.findings.audited import Audit
from workbench.parameter_server.cluster.cluster import create_in_process_cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.coordinator.dispatch import Dispatcher
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.servers.server import ServerRuntime
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.strategy_model import StrategyModel
from workbench.parameter_server.training.trainer import ParameterServerTrainer
from workbench.playbook.verdict import diagnose_record
from workbench.report.write import draw_figures
from workbench.topics.parameter_server.diagnose import diagnose_parameter_server, server_remedies
from workbench.topics.parameter_server.server_load import CODES, load_ratios, server_throughput
from workbench.topics.parameter_server.study import (
    ParameterServerStudy,
    audit_parameter_server,
    lr_load,
    return_values,
    vocabulary_load,
    zipf_shares,
)

SLOW = 0.05  # beside which no hand-over between threads counts, on a busy machine either


def slowed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nap: float = SLOW) -> list[int]:
    """Let a method take so much longer, and return a list that grows with each call."""
    method, calls = getattr(owner, name), []

    def slow(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        time.sleep(nap)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    return calls


def trained(out: Path, steps: int = 45, **settings: Any) -> Any:
    workload = small_workload()
    config = workload.config.replace(total_steps=steps, eval_every_steps=steps)
    return wb.open(ParameterServerTrainer(**settings).run(workload, config, out=out).path)


def test_the_walk_and_its_report_have_verdicts_and_figures_of_the_servers(tmp_path: Path) -> None:
    trainer = ParameterServerTrainer(workers=2)
    record = wb.lr_sweep.Study(lrs=(0.01, 0.1)).run(small_workload(), trainer=trainer, out=tmp_path / "sweep")
    found = diagnose_record(record)
    assert sorted(f.code for f in found if f.code.startswith("ps.")) == sorted(CODES)
    drawn = {each.figure.name: each for each in draw_figures(record, found)}
    assert drawn["server-load"].svg
    assert drawn["staleness"].svg
    assert "throughput" not in drawn


def test_the_record_says_how_time_and_loads_were_spent(tmp_path: Path) -> None:
    record = trained(tmp_path / "run", 60, workers=2, servers=2, steps_per_closure=4)
    facts = record.facts["parameter_server"]["0"]
    assert facts["updates"] == 59  # the first one makes the replicas and is not timed
    assert facts["steps"] == 60
    assert facts["closures_timed"] == 15
    spent = sum(mine[f"{part}_s"] for mine in facts["work"] for part in ("data_wait", "pull", "compute", "push"))
    columns = record.steps[["data_wait_s", "pull_s", "compute_s", "push_s"]].iloc[1:].to_numpy().sum()
    assert spent == pytest.approx(columns, rel=1e-4)
    assert spent <= 2 * facts["training_s"]
    named = {name for load in facts["servers"] for block in load["blocks"].values() for name in block["parameters"]}
    assert named == {name for name, _ in small_workload().build_model().named_parameters()}


def test_auto_makes_larger_closures_where_dispatching_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch, Dispatcher, "_call", 0.015)
    facts = trained(tmp_path / "run", 120, workers=2, steps_per_closure="auto").facts["parameter_server"]["0"]
    assert facts["steps_per_closure"] == "auto"
    assert facts["closures_timed"] <= 8 + 20


def test_fit_makes_larger_closures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = slowed(monkeypatch, Dispatcher, "_call", 0.015)
    with create_in_process_cluster(num_workers=2, num_ps=1) as cluster:
        model = StrategyModel(small_workload(), ParameterServerStrategy(cluster))
        counts = []
        asked: Any
        for asked in (1, "auto"):
            before = len(sent)
            model.fit(epochs=1, steps_per_epoch=120, steps_per_execution=asked, validation_data=None, verbose=0)
            counts.append(len(sent) - before)
        assert model.steps == 240
    assert counts[0] >= 120
    assert counts[1] <= counts[0] / 3


def test_the_study_times_what_it_was_asked_to_and_goes_on_where_it_was(tmp_path: Path) -> None:
    study = ParameterServerStudy(workers=(1, 2), closures=(1, 5, "auto"), steps=40)
    record = study.run(small_workload(), out=tmp_path / "study")
    runs = record.facts["parameter_server_runs"]
    assert [row["name"] for row in runs] == ["1 workers", "2 workers", "5 a closure", "auto a closure", "sharded"]
    assert [row["workers"] for row in runs] == [1, 2, 2, 2, 2]
    assert list(record.trials["stage"]) == ["parameter_server"]
    assert {f.status for f in diagnose_parameter_server(record)} <= {"ok", "warn"}
    table = server_remedies(record).set_index("remedy")
    assert (server_throughput(record)["updates_per_s"] > 0).all()
    split = table.loc["split variables over the servers"]
    assert split["after"] < 1.2 < split["before"]
    before = (tmp_path / "study" / "study.json").stat().st_mtime_ns
    assert study.run(small_workload(), out=tmp_path / "study").facts["parameter_server_runs"] == runs
    assert (tmp_path / "study" / "study.json").stat().st_mtime_ns == before


def test_a_trainer_that_is_given_is_taken_with_the_studys_workers(tmp_path: Path) -> None:
    given = ParameterServerTrainer(workers=5, servers=3, steps_per_closure=4)
    study = ParameterServerStudy(workers=(2,), closures=(1,), steps=20, remedies=False)
    facts = study.run(small_workload(), out=tmp_path / "study", trainer=given).facts
    trial = facts["parameter_server"]["0"]
    assert (trial["workers"], len(trial["servers"]), trial["steps_per_closure"]) == (2, 3, 4)
    assert [(row["name"], len(row["servers"])) for row in facts["parameter_server_runs"]] == [
        ("2 workers", 3),
        ("sharded", 3),
    ]
    assert "parameter_server_remedies" not in facts
    timed = wb.open(tmp_path / "study" / "runs" / "2_workers_0").evals["step"]
    assert set(timed) == {0, 20}, "what is timed is not held up by evaluations"


@pytest.mark.cluster
def test_the_study_runs_on_actors(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    study = ParameterServerStudy(workers=(2,), closures=(), engine="ray", steps=40, remedies=False)
    record = study.run(wb.load_workload("digits_mlp"), out=tmp_path / "study")
    assert [row["engine"] for row in record.facts["parameter_server_runs"]] == ["ray"] * 2
    found = diagnose_parameter_server(record)
    assert {f.status for f in found} <= {"ok", "warn"}, found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", ()),
        ("workers", (0,)),
        ("workers", "3"),
        ("closures", ("all",)),
        ("repeats", 0),
        ("servers", 0),
        ("engine", "mpi"),
    ],
)
def test_what_cannot_be_is_refused(name: str, value: Any) -> None:
    with pytest.raises(wb.errors.ConfigError, match=f"{name}="):
        ParameterServerStudy(**{name: value})


def test_remedies_of_one_cluster_each_say_what_they_are_worth() -> None:
    """T11.3, T13.3, T13.4: none sees what another left on the servers."""
    words, batch = 1000, 256
    shares = zipf_shares(words)
    assert float(shares.sum()) == pytest.approx(1.0)
    assert float(shares[0] / shares[9]) == pytest.approx(10.0)
    with create_in_process_cluster(2, 2) as cluster:
        loads = vocabulary_load(cluster, shuffled=None, words=words, lookups=20, batch=batch)
        shuffled = [vocabulary_load(cluster, shuffled=seed, words=words, lookups=20, batch=batch) for seed in range(3)]
        times = return_values(cluster, values=1000, closures=5, rounds=2)
        variable, planned = (
            diagnose_parameter_server(_audit(lr_load(cluster, each, steps=20)))["ps.hotspot"] for each in (True, False)
        )
        assert [cluster.engine.plane.ask(server, "load_report") for server in range(2)] == [{}, {}]
    distinct = 1 - (1 - shares) ** batch  # expected: each word that a lookup draws at all is sent once
    ratio = 2 * float(distinct[: words // 2].sum() / distinct.sum())
    assert load_ratios(loads)["bytes"] == pytest.approx(ratio, rel=0.02)
    assert max(load_ratios(each)["bytes"] for each in shuffled) < 1.3
    assert diagnose_parameter_server(_audit(loads))["ps.imbalance"].clause == "T13.4"
    assert min(times["with_s"], times["without_s"]) > 0
    assert (variable.status, variable.value, variable.evidence["variable"]) == ("warn", pytest.approx(1.0), "lr")
    assert planned.status == "ok"
    assert planned.evidence["requests"] == [40.0, 40.0]  # a pull and a push a step


def test_a_loop_of_ones_own_is_audited() -> None:
    with create_in_process_cluster(2, 2) as cluster:
        strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(2))
        coordinator = ClusterCoordinator(strategy)
        counter = strategy.variable(0.0, name="counter")
        for _ in range(10):
            coordinator.schedule(counter.assign_add, args=(1.0,))
        coordinator.join()
        found = diagnose_parameter_server(audit_parameter_server(coordinator, name="mine"))
        coordinator.shutdown()
    assert found.workload == "mine"
    assert found["ps.hotspot"].value == pytest.approx(2.0)  # the write, and a read of the variable that it returns
    assert found["ps.bound"].status == found["ps.staleness"].status == "not_measured"


class Loop:
    """A training loop of one's own on two workers; each hook is called once an update."""

    def __init__(self, **naps: float) -> None:
        self.naps = naps

    def nap(self, where: str) -> None:
        time.sleep(self.naps.get(where, 0.0))

    def run(self, updates: int = 40, *, one_by_one: bool = False, harm: Any = None, **audited: Any) -> Any:
        def batches() -> Any:
            while True:
                self.nap("data")
                yield torch.ones(1, 2)

        def push(placed: Any, iterator: Any) -> None:
            x = next(iterator)
            with placed.step() as module:
                self.nap("compute")
                module(x).sum().backward()

        with create_in_process_cluster(2, 2) as cluster:
            strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(2))
            coordinator = ClusterCoordinator(strategy)
            config = TrainConfig(peak_lr=0.1, total_steps=updates, batch_size=1, optimizer="sgd")
            placed = strategy.place(nn.Linear(2, 2), config)
            iterator = iter(coordinator.create_per_worker_dataset(batches))
            for _ in range(updates):
                done = coordinator.schedule(push, args=(placed, iterator))
                if one_by_one:
                    done.fetch()
                    self.nap("loop")
            coordinator.join()
            if harm is not None:
                harm(cluster, coordinator)
            audit = audit_parameter_server(coordinator, placed, **audited)
            coordinator.shutdown()
        return audit


@pytest.mark.parametrize(
    ("naps", "owner", "cause", "advice"),
    [
        ({"compute": SLOW}, None, "worker", "More workers"),
        ({"data": SLOW}, None, "worker", "They wait for their data"),
        ({"loop": SLOW}, None, "coordinator", "Make several updates in one closure"),
        ({}, Dispatcher, "coordinator", "Make several updates in one closure"),
        # How evenly two servers are busy is up to the machine; test_parameter_server.py holds which advice follows from it.
        ({}, ServerRuntime, "server", ("Use more servers", "Split large variables")),
    ],
    ids=["healthy", "data", "loop", "dispatch", "server"],
)
def test_a_bottleneck_planted_in_a_loop_of_ones_own_is_named(
    naps: dict[str, float], owner: Any, cause: str, advice: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T13.1, T13.5: where workers themselves take the time nothing is wrong."""
    if owner is not None:
        slowed(monkeypatch, owner, "_call" if owner is Dispatcher else "push")
    found = diagnose_parameter_server(Loop(**naps).run(one_by_one="loop" in naps))["ps.bound"]
    assert found.evidence["cause"] == cause, found
    assert found.status == ("ok" if cause == "worker" else "warn")
    assert found.advice[0].startswith(advice)
    assert sum(found.evidence["shares"].values()) == pytest.approx(1)


def test_seconds_that_are_given_are_the_loop_s() -> None:
    """Workers that were busy for a second of two times a hundred were idle for the rest."""
    facts = Loop(compute=0.01).run(40, seconds=100.0).facts["parameter_server"]["0"]
    assert facts["training_s"] == 100.0
    busy = sum(mine[f"{part}_s"] for mine in facts["work"] for part in ("data_wait", "pull", "compute", "push"))
    assert sum(mine["compute_s"] for mine in facts["work"]) >= 40 * 0.01
    assert sum(mine["updates"] for mine in facts["work"]) == pytest.approx(40)
    found = diagnose_parameter_server(_audit(facts))["ps.bound"]
    assert found.evidence["shares"]["idle"] == pytest.approx(1 - busy / 200)
    assert found.evidence["cause"] == "coordinator"


def _start_anew(cluster: Any, _: Any) -> None:
    for worker in range(2):
        cluster.engine.kill("worker", worker)
        cluster.engine.restart("worker", worker)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda cluster, _: cluster.engine.kill("worker", 0), "a worker is away"),
        (_start_anew, "know of 0 of the 40 functions alone"),
        (lambda _, coordinator: coordinator.shutdown(), "the coordinator was shut down before"),
    ],
    ids=["away", "new", "shut down"],
)
def test_times_that_nobody_has_any_more_are_not_made_up(harm: Any, why: str) -> None:
    found = diagnose_parameter_server(Loop().run(harm=harm))
    assert found["ps.bound"].status == "not_measured"
    assert why in found["ps.bound"].summary
    assert found["ps.imbalance"].status != "not_measured"


def test_steps_are_those_that_were_made_here_and_not_a_checkpoint_s() -> None:
    with create_in_process_cluster(1, 2) as cluster:
        strategy = ParameterServerStrategy(cluster)
        coordinator = ClusterCoordinator(strategy)
        placed = strategy.place(nn.Linear(2, 2), TrainConfig(peak_lr=0.1, total_steps=9, batch_size=1, optimizer="sgd"))
        placed.load_state_dict(placed.state_dict() | {"steps": 100})

        def push() -> None:
            with placed.step() as module:
                module(torch.ones(1, 2)).sum().backward()

        for _ in range(5):
            coordinator.schedule(push)
        coordinator.join()
        audit = audit_parameter_server(coordinator, placed)
        assert audit_parameter_server(coordinator, placed, steps=7).facts["parameter_server"]["0"]["steps"] == 7
        coordinator.shutdown()
    facts = audit.facts["parameter_server"]["0"]
    assert facts["steps"] == 5
    assert [block["version"] for load in facts["servers"] for block in load["blocks"].values()] == [105, 105]


def _audit(facts: dict[str, Any]) -> Audit:
    return Audit(facts={"parameter_server": {"0": facts}}, workload="loop")
