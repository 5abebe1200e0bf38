"""Who is in a cluster, and what is none."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from workbench.errors import UnknownNameError, UsageError
from workbench.parameter_server.cluster.cluster_spec import ClusterSpec, Task, devices_each, split_address

TUTORIAL = {
    "worker": ["host1:2222", "host2:2222", "host3:2222"],
    "ps": ["host4:2222", "host5:2222"],
    "chief": ["host6:2222"],
}


def without(job: str) -> dict[str, list[str]]:
    return {name: addresses for name, addresses in TUTORIAL.items() if name != job}


def test_the_cluster_of_the_tutorial() -> None:
    """T1.5, T9.3."""
    spec = ClusterSpec.from_dict(TUTORIAL)
    assert spec == ClusterSpec(
        worker=("host1:2222", "host2:2222", "host3:2222"), ps=("host4:2222", "host5:2222"), chief=("host6:2222",)
    )
    assert list(map(str, spec.tasks)) == ["chief 0", "worker 0", "worker 1", "worker 2", "ps 0", "ps 1"]
    assert spec.address(Task("ps", 1)) == "host5:2222"
    assert spec.to_dict() == TUTORIAL
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, ClusterSpec.from_dict(TUTORIAL)}) == 1


def test_the_coordinator_and_the_evaluator_may_be_missing() -> None:
    """Behaviour 67, T1.7, T1.8."""
    spec = ClusterSpec.from_dict(without("chief"))
    assert spec.chief == ()
    assert "chief" not in spec.to_dict()
    assert ClusterSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(("job", "hint"), [("gpu", ""), ("workers", "Did you mean 'worker'"), ("master", "'chief'")])
def test_another_job_is_refused(job: str, hint: str) -> None:
    """Behaviour 66, T1.11."""
    with pytest.raises(
        UsageError, match=rf"Disallowed task type '{job}'.*{hint}.*Allowed: chief, worker, ps\..*take it out"
    ):
        ClusterSpec.from_dict({**TUTORIAL, job: ["host9:2222"]})


def test_an_evaluator_in_the_cluster_is_refused() -> None:
    """Behaviour 67."""
    with pytest.raises(
        UsageError, match=r"Disallowed task type 'evaluator'.*\(host7:2222\).*wait for it without end.*Take it out"
    ):
        ClusterSpec.from_dict({**TUTORIAL, "evaluator": ["host7:2222"]})


@pytest.mark.parametrize("job", ["worker", "ps"])
@pytest.mark.parametrize("empty", [True, False])
def test_no_workers_and_no_servers_are_refused(job: str, empty: bool) -> None:
    """Behaviour 66, T1.8."""
    given = {**without(job), **({job: []} if empty else {})}
    with pytest.raises(UsageError, match=rf'0 tasks of type \'{job}\' and needs at least 1.*Give "{job}"'):
        ClusterSpec.from_dict(given)


def test_two_coordinators_are_refused() -> None:
    """Behaviour 66."""
    with pytest.raises(UsageError, match=r"2 tasks of type 'chief' \(a:1, b:1\).*at most 1.*Keep one"):
        ClusterSpec.from_dict({**TUTORIAL, "chief": ["a:1", "b:1"]})


@pytest.mark.parametrize(
    ("change", "pair"),
    [
        ({"ps": ["host4:2222", "host4:2222"]}, "ps 0 and ps 1"),
        ({"ps": ["HOST1:2222"]}, "worker 0 and ps 0"),
        ({"chief": ["host5:02222"]}, "chief 0 and ps 1"),
    ],
)
def test_an_address_is_given_once(change: dict[str, list[str]], pair: str) -> None:
    """T1.9."""
    with pytest.raises(UsageError, match=rf"{pair} have the same address.*port of its own"):
        ClusterSpec.from_dict({**TUTORIAL, **change})


def test_hosts_and_ports_may_repeat_apart() -> None:
    spec = ClusterSpec(worker=("localhost:1", "localhost:2"), ps=("127.0.0.1:1",))
    assert len(spec.tasks) == 3


@pytest.mark.parametrize("given", ["host1:2222", None, 3, {"0": "host1:2222"}])
def test_addresses_come_in_lists(given: Any) -> None:
    with pytest.raises(UsageError, match="worker=.*must be a list of addresses"):
        ClusterSpec.from_dict({**TUTORIAL, "worker": given})


def test_a_cluster_is_a_mapping() -> None:
    with pytest.raises(UsageError, match=r"must map chief, worker, ps to lists of 'host:port', not be \['a:1'\]"):
        ClusterSpec.from_dict(["a:1"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host:1", ("host", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:2222", ("[::1]", 2222)),
        ("job-worker-0.space.svc:2222", ("job-worker-0.space.svc", 2222)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":2222",
        "host:x",
        "host:-1",
        "host:²",
        "::1:2222",
        "[]:1",
        "http://h:1",
        "a b:1",
        "u@h:1",
        3,
        None,
    ],
)
def test_what_is_no_address(address: Any) -> None:
    with pytest.raises(UsageError, match=r"is not understood. Allowed: 'host:port'"):
        split_address(address)


@pytest.mark.parametrize("port", [0, 65536, 10**9])
def test_a_port_out_of_range_names_its_task(port: int) -> None:
    """T1.9."""
    with pytest.raises(UsageError, match=rf"worker 1: address='b:{port}' has a port out of range.*1 to 65535"):
        ClusterSpec.from_dict({**TUTORIAL, "worker": ["a:1", f"b:{port}"]})


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("foobar", ""),
        ("coordinator", "Did you mean 'chief'"),
        ("WORKER", "Did you mean 'worker'"),
        (None, ""),
        ("", ""),
    ],
)
def test_an_unknown_task_type_is_not_the_coordinator(given: Any, hint: str) -> None:
    """Behaviour 66, T9.5."""
    with pytest.raises(
        UnknownNameError,
        match=rf"Unrecognized task type {given!r}.*{hint}.*chief, worker, ps, evaluator.*none is guessed",
    ):
        Task(given)


@pytest.mark.parametrize("index", [-1, 1.0, "1", None, True])
def test_an_index_is_a_number_from_0(index: Any) -> None:
    with pytest.raises(UsageError, match=r"index=.*of the worker task must be an integer of at least 0"):
        Task("worker", index)


@pytest.mark.parametrize("kind", ["chief", "evaluator"])
def test_there_is_one_coordinator_and_one_evaluator(kind: Any) -> None:
    with pytest.raises(UsageError, match=rf"index=1 of the {kind} task must be 0"):
        Task(kind, 1)


@pytest.mark.parametrize(
    ("task", "known"),
    [(Task("worker", 3), "worker 0 to 2"), (Task("ps", 9), "ps 0 to 1"), (Task("evaluator"), "no evaluator")],
)
def test_a_task_that_the_cluster_lacks(task: Task, known: str) -> None:
    """T1.8, T1.9."""
    with pytest.raises(UsageError, match=rf"to be {task}, and the cluster has {known}"):
        ClusterSpec.from_dict(TUTORIAL).address(task)


def test_equal_devices() -> None:
    """Behaviour 66, T1.12."""
    assert devices_each([2, 2, 2]) == 2
    assert devices_each([0]) == 0


@pytest.mark.parametrize(("counts", "said"), [([2, 1, 2], "worker 0: 2, worker 1: 1, worker 2: 2"), ([], "no workers")])
def test_unequal_devices_are_refused(counts: list[int], said: str) -> None:
    """Behaviour 66, T1.12."""
    with pytest.raises(UsageError, match=rf"same number of devices \({said}\).*CUDA_VISIBLE_DEVICES"):
        devices_each(counts)
