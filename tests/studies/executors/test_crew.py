"""Workers are asked for where there is room, as large as pays, and none is waited for that cannot come."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from workbench.errors import ClusterError
from workbench.ray.cluster import WorkerLost
from workbench.studies.executors import crew as crew_module
from workbench.studies.executors.crew import Crew


class Machines:
    """A cluster of machines with free CPUs and GPUs; workers start when they are told to."""

    def __init__(self, cpus: dict[str, int], gpus: dict[str, int] | None = None, busy: bool = False) -> None:
        self.have = {"CPU": dict(cpus), "GPU": dict(gpus or {})}
        self.busy = busy
        self.placed: list[tuple[str | None, int, int]] = []
        self.killed: list[Any] = []
        self.broken = False

    def total(self, resource: str) -> int:
        return sum(self.have[resource].values())

    def free(self, resource: str) -> dict[str, int]:
        return {} if self.busy else dict(self.have[resource])

    def place(self, kind: type, *arguments: Any, node: str | None, cpus: int, gpus: int) -> int:
        self.placed.append((node, cpus, gpus))
        assert arguments[1] == cpus, "as many threads as CPUs"
        if node is not None:
            self.have["CPU"][node] -= cpus
        return len(self.placed) - 1

    def call(self, worker: int, method: str, *arguments: Any) -> tuple[int, str]:
        return worker, method

    def result(self, call: tuple[int, str]) -> Any:
        if self.broken:
            raise WorkerLost("no module named workbench")
        return {"ray_node": str(self.placed[call[0]][0]), "pid": call[0]}

    def kill(self, worker: Any) -> None:
        self.killed.append(worker)


def crew_on(machines: Machines, **options: Any) -> Crew:
    return Crew(machines, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cpus", "workers"),
    [
        ({"a": 1}, [("a", 1)]),
        ({"a": 2}, [("a", 2)]),
        ({"a": 4}, [("a", 4)]),
        ({"a": 6}, [("a", 3), ("a", 3)]),
        ({"a": 9, "b": 1}, [("a", 3), ("b", 1), ("a", 3), ("a", 3)]),
    ],
)
def test_a_machine_s_cpus_are_shared_out_among_few_workers(cpus: dict[str, int], workers: list[Any]) -> None:
    machines = Machines(cpus)
    crew = crew_on(machines)
    assert crew.room() == len(workers)
    crew.ask_for(99)
    assert [(node, cpus) for node, cpus, _ in machines.placed] == workers


def test_no_more_workers_are_asked_for_than_there_are_chunks() -> None:
    machines = Machines({"a": 16, "b": 16})
    crew = crew_on(machines)
    crew.ask_for(2)
    assert [node for node, _, _ in machines.placed] == ["a", "b"], "one on each machine"
    crew.ask_for(2)
    assert len(machines.placed) == 2, "those that start are on their way"
    for call in crew.calls:
        crew.greet(call)
    crew.ask_for(2)
    assert len(machines.placed) == 2
    assert crew.take().node == "a"
    crew.ask_for(2)
    assert len(machines.placed) == 3


def test_a_gpu_each() -> None:
    machines = Machines({"a": 16}, {"a": 2})
    crew = crew_on(machines, gpu=True)
    assert crew.room() == 2
    crew.ask_for(5)
    assert machines.placed == [("a", 1, 1), ("a", 1, 1)]


@pytest.mark.parametrize(("gpu", "said"), [(False, r"no CPU\. Add"), (True, r"no GPU\..*Trainer\(device='cpu'\)")])
def test_a_cluster_that_never_has_room_is_an_error(gpu: bool, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        crew_on(Machines({}), gpu=gpu).room()


def test_a_busy_cluster_is_waited_for_and_said_to_be(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "SETTLE_S", 0.0)
    machines = Machines({"a": 8}, busy=True)
    crew = crew_on(machines)
    assert crew.room() == 1
    crew.ask_for(3)
    crew.ask_for(3)
    assert machines.placed == [(None, 1, 0)], "one that waits, wherever there will be room"
    with caplog.at_level(logging.WARNING):
        crew.check()
        assert not caplog.records
        monkeypatch.setattr(crew_module, "GONE_S", 0.0)
        crew.check()
        assert not caplog.records
        monkeypatch.setattr(crew_module, "PATIENCE_S", 0.0)
        crew.check()
    assert "waiting for a free CPU on the Ray cluster: it has 8 in all" in caplog.text


def test_a_cluster_whose_machines_are_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines({"a": 2})
    crew = crew_on(machines)
    crew.ask_for(1)
    crew.greet(crew.calls[0])
    worker = crew.take()
    monkeypatch.setattr(crew_module, "GONE_S", 0.0)
    machines.have["CPU"].clear()
    crew.check()
    crew.lose(worker)
    with pytest.raises(ClusterError, match=r"no CPU any more.*asleep.*the same call goes on"):
        crew.check()


def test_workers_that_cannot_start_are_given_up_after_a_few() -> None:
    machines = Machines({"a": 2})
    machines.broken = True
    crew = crew_on(machines)
    for _ in range(2):
        machines.have["CPU"]["a"] = 2
        crew.ask_for(1)
        crew.greet(crew.calls[0])
    machines.have["CPU"]["a"] = 2
    crew.ask_for(1)
    with pytest.raises(ClusterError, match=r"no worker can be started.*no module named workbench"):
        crew.greet(crew.calls[0])


def test_all_are_dismissed_at_the_end() -> None:
    machines = Machines({"a": 4, "b": 4, "c": 4})
    crew = crew_on(machines)
    crew.ask_for(3)
    for call in crew.calls[:2]:
        crew.greet(call)
    crew.take()
    crew.dismiss()
    assert sorted(machines.killed) == [0, 1, 2]
    assert not crew.calls
    assert not crew.idle
