"""`ParameterServerStudy`, `audit_parameter_server`: what a workload's training on parameter servers is bound by (T13), and what remedies for uneven or useless load are worth, each tried in a small loop on a cluster that is up (T11.3, T13.3, T13.4)."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.errors import ConfigError, UsageError
from workbench.findings.audited import Audit
from workbench.parameter_server.cluster.cluster import Cluster, create_in_process_cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.variable import RemoteTensor
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.load import load_facts, time_facts
from workbench.parameter_server.training.trainer import ParameterServerTrainer
from workbench.ray.cluster import RayCluster
from workbench.record.read import StudyRecord
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session


def measure_remedies(cluster: Cluster) -> dict[str, Any]:
    """Return facts on three remedies, before and after, on one cluster with nothing on its servers: lr, vocabulary, return_values."""
    return {
        "lr": {"before": lr_load(cluster, True), "after": lr_load(cluster, False)},
        "vocabulary": {
            "before": vocabulary_load(cluster, shuffled=None),
            "after": [vocabulary_load(cluster, shuffled=seed) for seed in range(3)],
        },
        "return_values": return_values(cluster),
    }


@contextlib.contextmanager
def _loop(cluster: Cluster) -> Iterator[tuple[ParameterServerStrategy, ClusterCoordinator]]:
    """Hand out what a loop needs, variables in a shard a server, and empty the servers afterwards."""
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(cluster.num_ps))
    coordinator = ClusterCoordinator(strategy)
    yield strategy, coordinator
    coordinator.shutdown()
    plane = cluster.engine.plane
    for server in range(cluster.num_ps):
        for block in plane.ask(server, "load_report"):
            plane.ask(server, "delete", block)


def _seconds(coordinator: ClusterCoordinator, calls: list[Callable[[], Any]]) -> float:
    """Schedule the functions, and return how long they took."""
    begun = time.perf_counter()
    for call in calls:
        coordinator.schedule(call)
    coordinator.join()
    return time.perf_counter() - begun


def lr_load(cluster: Cluster, as_variable: bool, *, steps: int = 60) -> dict[str, Any]:
    """Train a small net whose learning rate is a variable that every step reads, or a schedule that each server works out (T13.3)."""
    config = TrainConfig(peak_lr=0.01, total_steps=steps, batch_size=8, optimizer="sgd", schedule="cosine")
    with _loop(cluster) as (strategy, coordinator):
        placed = strategy.place(nn.Linear(16, 16), config)
        lr = strategy.variable(0.01, name="lr") if as_variable else None
        seconds = _seconds(coordinator, [partial(_step, placed, lr)] * steps)
        return load_facts(coordinator, placed, seconds=seconds)


def _step(placed: PlacedModule, lr: RemoteTensor | None) -> None:
    with placed.step() as module:
        scale = 1.0 if lr is None else float(lr) / 0.01
        (scale * module(torch.ones(8, 16)).square().mean()).backward()


def zipf_shares(words: int) -> Tensor:
    """Return how often each word of a vocabulary occurs, the most frequent first: proportional to 1 / rank."""
    weights = 1 / torch.arange(1, words + 1, dtype=torch.float64)
    return weights / weights.sum()


def vocabulary_load(
    cluster: Cluster, *, shuffled: int | None, words: int = 5000, lookups: int = 40, batch: int = 256
) -> dict[str, Any]:
    """Look up rows of an embedding that has a shard on each server, by ids that follow Zipf's law (T13.4)."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.multinomial(zipf_shares(words), lookups * batch, True, generator=generator)
    order = torch.arange(words)
    if shuffled is not None:
        order = torch.randperm(words, generator=generator.manual_seed(shuffled + 1))
    with _loop(cluster) as (strategy, coordinator):
        table = strategy.variable(torch.zeros(words, 16), name="words")
        ids = order[ranks].view(lookups, batch)
        seconds = _seconds(coordinator, [partial(table.gather, each) for each in ids])
        return load_facts(coordinator, seconds=seconds)


def return_values(cluster: Cluster, *, values: int = 250_000, closures: int = 40, rounds: int = 5) -> dict[str, Any]:
    """Time functions that return a tensor of `values` numbers against the same ones that return nothing, in turn (T11.3, T13.8)."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with _loop(cluster) as (_, coordinator):
        for _round in range(rounds + 1):
            for returns in (True, False):
                seconds[returns].append(_seconds(coordinator, [partial(_ones, values, returns)] * closures) / closures)
    # the first round warms up
    return {"values": values, "with_s": median(seconds[True][1:]), "without_s": median(seconds[False][1:])}


def _ones(values: int, returns: bool) -> Tensor | None:
    made = torch.ones(values)
    return made if returns else None


@dataclass(frozen=True, kw_only=True)
class ParameterServerStudy(Study):
    """One trial on parameter servers, evaluated as usual, then short ones that are timed: other numbers of workers, of updates a closure,
    and sharded; and small loops that try the other remedies.

    The timed ones train with the same config; trials of one study differ in their configs, so each has a folder of its own below the
    study's, and their numbers are facts of the study.

    Attributes:
        workers: numbers of workers to time (T1.3); the trial itself has the largest.
        closures: updates a closure to time, with that many workers (T13.6, T13.7); "auto" is the tool's choice (T14.3).
        servers: parameter servers.
        engine: "threads" in this process, or "ray", a process each.
        steps: updates of every run; None is the baseline's.
        repeats: of every timed run, in turn, so that what else the machine does falls on all of them.
        remedies: try the lr variable, the shuffled vocabulary and functions without a return value (T11.3, T13.3, T13.4).
    """

    stem: ClassVar[str] = "parameter_server"

    workers: Sequence[int] = (1, 2, 3)
    closures: Sequence[int | Literal["auto"]] = (1, 10, "auto")
    servers: int = 2
    engine: Literal["threads", "ray"] = "threads"
    steps: int | None = 150
    repeats: int = 1
    remedies: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.workers, Sequence) or not self.workers or any(not _count(each) for each in self.workers):
            raise ConfigError(
                f"workers={self.workers!r} must hold integers of at least 1, at least one of them, such as (1, 2, 3)."
            )
        if isinstance(self.closures, str) or any(each != "auto" and not _count(each) for each in self.closures):
            raise ConfigError(f'closures={self.closures!r} must hold integers of at least 1, or "auto".')
        if not _count(self.repeats):
            raise ConfigError(f"repeats={self.repeats!r} must be an integer of at least 1.")
        ParameterServerTrainer(workers=max(self.workers), servers=self.servers, engine=self.engine)

    def extend(self, session: Session) -> None:
        """Train, time, and try the remedies."""
        base = self._trainer(session)
        # one Ray cluster for all runs, which join it: starting one takes longer than a run
        with contextlib.closing(RayCluster.connect()) if base.engine == "ray" else contextlib.nullcontext():
            session.trials([session.config], stage=Role.PARAMETER_SERVER, trainer=base)
            facts = session.record.facts
            if "parameter_server_runs" not in facts:
                session.facts(parameter_server_runs=self._timed(session, base))
            if self.remedies and "parameter_server_remedies" not in facts:
                with create_in_process_cluster(2, 2, engine=base.engine) as cluster:
                    session.facts(parameter_server_remedies=measure_remedies(cluster))

    def _trainer(self, session: Session) -> ParameterServerTrainer:
        """Return the trainer that the study was given, where it is of this kind."""
        given: Any = session.trainer
        if isinstance(given, ParameterServerTrainer):
            return replace(given, workers=max(self.workers))
        return ParameterServerTrainer(workers=max(self.workers), servers=self.servers, engine=self.engine)

    def _timed(self, session: Session, base: ParameterServerTrainer) -> list[dict[str, Any]]:
        config = session.config.replace(eval_every_steps=session.config.total_steps)
        variants = {f"{count} workers": replace(base, workers=count, steps_per_closure=1) for count in self.workers}
        variants |= {f"{size} a closure": replace(base, steps_per_closure=size) for size in self.closures if size != 1}
        variants["sharded"] = replace(base, variable_partitioner=FixedShardsPartitioner(base.servers))
        folder = session.writer.record.path / "runs"
        rows = []
        for number, (name, trainer) in itertools.product(range(self.repeats), variants.items()):
            out, note = folder / f"{name.replace(' ', '_')}_{number}", f"timed for {session.writer.record.path.name}"
            trainer.run(session.workload, config, out=out, note=note)
            rows.append({"name": name} | StudyRecord(out).facts["parameter_server"]["0"])
        return rows


def audit_parameter_server(
    coordinator: ClusterCoordinator,
    placed: PlacedModule | None = None,
    *,
    steps: int | None = None,
    seconds: float = float("nan"),
    name: str = "a training loop",
) -> Audit:
    """Return what servers and workers did so far in a loop of your own, for `diagnose_parameter_server`.

    Call it before `coordinator.shutdown()`: the workers are asked how they spent their time (T13.5).

    Args:
        placed: the module that is trained; None where it trains variables alone.
        steps: that were made; None counts the updates of `placed`, or the functions that ran.
        seconds: that they took; NaN is the time in which the coordinator had something to do, pauses of over 5 s left out.
        name: said in the diagnosis.
    """
    if not isinstance(coordinator, ClusterCoordinator):
        raise UsageError(
            f"wb.ps.audit takes the wb.ps.ClusterCoordinator of the loop, not {type(coordinator).__name__}."
        )
    facts = load_facts(coordinator, placed, seconds=seconds)
    if steps is not None:
        facts["steps"] = steps
    facts |= time_facts(coordinator, seconds=seconds, updates=facts["steps"])
    return Audit(facts={"parameter_server": {"0": facts}}, workload=name)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
