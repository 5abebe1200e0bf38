"""Who is in a cluster, what is none, and who this process is: from a string, a file or the environment."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import UnknownNameError, UsageError
from workbench.parameter_server.cluster.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    Task,
    split_address,
)

TUTORIAL = {
    "worker": ["host1:2222", "host2:2222", "host3:2222"],
    "ps": ["host4:2222", "host5:2222"],
    "chief": ["host6:2222"],
}


def config(kind: Any = "worker", index: Any = 1, **more: Any) -> str:
    return json.dumps({"cluster": TUTORIAL, "task": {"type": kind, "index": index}, **more})


def test_the_cluster_of_the_tutorial() -> None:
    """T1.5, T9.3; a description goes through pickle and JSON."""
    spec = ClusterSpec.from_dict(TUTORIAL)
    assert list(map(str, spec.tasks)) == ["chief 0", "worker 0", "worker 1", "worker 2", "ps 0", "ps 1"]
    assert spec.address(Task("ps", 1)) == "host5:2222"
    assert spec.to_dict() == TUTORIAL
    assert {pickle.loads(pickle.dumps(spec)), ClusterSpec.from_dict(TUTORIAL)} == {spec}
    found = ClusterResolver.from_json(config())
    assert (found.role, found.address, found.chief_address) == ("worker", "host2:2222", ("host6", 2222))
    for each in (found, ClusterResolver.from_json('{"task": {"type": "evaluator"}}')):
        again = ClusterResolver.from_json(each.to_json())
        assert (again.cluster_spec, again.task) == (each.cluster_spec, each.task)


def test_a_cluster_without_a_coordinator() -> None:
    """Behaviour 67, T1.7, T1.8."""
    jobs = {job: addresses for job, addresses in TUTORIAL.items() if job != "chief"}
    spec = ClusterSpec.from_dict(jobs)
    assert (spec.chief, spec.to_dict()) == ((), jobs)
    with pytest.raises(UsageError, match='Add "chief"'):
        _ = ClusterResolver(spec, Task("worker")).chief_address


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": ["a:1"]}, r"Disallowed task type 'gpu'.*Allowed: chief, worker, ps\."),
        ({"workers": ["a:1"]}, "Did you mean 'worker'"),
        ({"master": ["a:1"]}, "Did you mean 'chief'"),
        ({"evaluator": ["host7:2222"]}, r"Disallowed task type 'evaluator'.*host7:2222.*wait for it without end"),
        ({"worker": []}, "0 tasks of type 'worker' and needs at least 1"),
        ({"ps": []}, "0 tasks of type 'ps' and needs at least 1"),
        ({"chief": ["a:1", "b:1"]}, r"2 tasks of type 'chief' \(a:1, b:1\).*at most 1"),
        ({"ps": ["host4:2222", "host4:2222"]}, "ps 0 and ps 1 have the same address"),
        ({"ps": ["HOST1:2222"]}, "worker 0 and ps 0 have the same address"),
        ({"chief": ["host5:02222"]}, "chief 0 and ps 1 have the same address"),
        ({"worker": "host1:2222"}, "worker=.*must be a list of addresses"),
        ({"worker": {"0": "host1:2222"}}, "worker=.*must be a list of addresses"),
        ({"worker": None}, "worker=.*must be a list of addresses"),
        ({"worker": ["a:1", "b:0"]}, "worker 1: address='b:0' has a port out of range.*1 to 65535"),
        ({"worker": ["a:1", "b:65536"]}, "worker 1: address='b:65536' has a port out of range"),
    ],
)
def test_what_is_no_cluster(change: dict[str, Any], message: str) -> None:
    """Behaviours 66, 67, T1.8, T1.9, T1.11."""
    with pytest.raises(UsageError, match=message):
        ClusterSpec.from_dict({**TUTORIAL, **change})
    with pytest.raises(UsageError, match="must map chief, worker, ps"):
        ClusterSpec.from_dict(["a:1"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host:1", ("host", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:2222", ("[::1]", 2222)),
        ("job-worker-0.space.svc:2222", ("job-worker-0.space.svc", 2222)),
        *((bad, None) for bad in ("", "host", "host:", ":2", "h:x", "h:-1", "h:²", "::1:2", "[]:1", "http://h:1", "a b:1", "u@h:1", 3)),
    ],
)  # fmt: skip
def test_addresses(address: Any, expected: tuple[str, int] | None) -> None:
    if expected is not None:
        assert split_address(address) == expected
        return
    with pytest.raises(UsageError, match=r"is not understood. Allowed: 'host:port'"):
        split_address(address)


@pytest.mark.parametrize(
    ("kind", "index", "error", "message"),
    [
        ("foobar", 0, UnknownNameError, "Unrecognized task type 'foobar'.*chief, worker, ps, evaluator.*none is guessed"),
        ("coordinator", 0, UnknownNameError, "Did you mean 'chief'"),
        ("WORKER", 0, UnknownNameError, "Did you mean 'worker'"),
        (None, 0, UnknownNameError, "Unrecognized"),
        (["worker"], 0, UnknownNameError, "Unrecognized"),
        ("worker", -1, UsageError, "worker index=-1 must be an integer of at least 0"),
        ("worker", None, UsageError, "worker index=None must be"),
        ("worker", True, UsageError, "worker index=True must be"),
        ("chief", 1, UsageError, "chief index=1 must be 0"),
        ("evaluator", 1, UsageError, "evaluator index=1 must be 0"),
        ("worker", 3, UsageError, "to be worker 3, and the cluster has 3 of type 'worker'"),
        ("ps", 2, UsageError, "to be ps 2, and the cluster has 2"),
    ],
)  # fmt: skip
def test_what_is_no_task(kind: Any, index: Any, error: type[Exception], message: str) -> None:
    """Behaviour 66, T1.8, T1.9, T9.5: never taken for the coordinator."""
    with pytest.raises(error, match=rf"TF_CONFIG: .*{message}"):
        ClusterResolver.from_json(config(kind, index), source="TF_CONFIG")


@pytest.mark.parametrize("task", [{}, {"task": None}, {"task": {}}, {"task": {"index": 0}}, {"task": "worker"}])
def test_a_missing_task_is_an_error(task: dict[str, Any]) -> None:
    """T9.5: nobody is taken for the coordinator because nothing was said."""
    with pytest.raises(UsageError, match=r'the "task" part must say which task this process is.*--role'):
        ClusterResolver.from_json(json.dumps({"cluster": TUTORIAL, **task}))
    resolver = ClusterResolver(ClusterSpec.from_dict(TUTORIAL))
    assert resolver.address is None
    with pytest.raises(UsageError, match=r"not said which task this process is. Give --role worker --index 0"):
        _ = resolver.role


def test_what_templates_add_is_skipped() -> None:
    """T9.2: another layer, an environment, a quoted index; the only coordinator needs none."""
    found = ClusterResolver.from_json(config("ps", "1", rpc_layer="grpc", environment="cloud"))
    assert (found.task, found.address) == (Task("ps", 1), "host5:2222")
    text = json.dumps({"cluster": TUTORIAL, "task": {"type": "chief"}})
    assert ClusterResolver.from_json(text).task == Task("chief", 0)


@pytest.mark.parametrize("more", [{}, {"cluster": None}, {"cluster": {}}, {"cluster": {"evaluator": ["host7:2222"]}}])
def test_an_evaluator_alone_needs_no_cluster(more: dict[str, Any]) -> None:
    """T1.8 to T1.10, T9.4."""
    found = ClusterResolver.from_json(json.dumps({"task": {"type": "evaluator", "index": 0}, **more}))
    assert (found.role, found.cluster_spec, found.address) == ("evaluator", None, None)
    for kind in ("chief", "worker", "ps"):
        with pytest.raises(UsageError, match=rf'{kind} 0 needs the "cluster" part.*Only an evaluator goes without'):
            ClusterResolver.from_json(json.dumps({"task": {"type": kind, "index": 0}}))


def test_an_evaluator_may_know_the_cluster_and_stays_outside() -> None:
    """Behaviour 67, T1.10, T9.4: the same text makes any other task refuse it."""
    jobs = {**TUTORIAL, "evaluator": ["host7:2222"]}
    found = ClusterResolver.from_json(json.dumps({"cluster": jobs, "task": {"type": "evaluator", "index": 0}}))
    assert (found.cluster_spec, found.address) == (ClusterSpec.from_dict(TUTORIAL), None)
    with pytest.raises(UsageError, match="Disallowed task type 'evaluator'"):
        ClusterResolver.from_json(json.dumps({"cluster": jobs, "task": {"type": "chief", "index": 0}}))


@pytest.mark.parametrize("text", ["", "nonsense", "{", "[1]", "null", '"worker"'])
def test_what_is_no_such_json(text: str) -> None:
    with pytest.raises(UsageError, match=r"here: .*(this is no JSON|must be an object)"):
        ClusterResolver.from_json(text, source="here")


def test_a_key_that_stands_there_twice_is_not_lost() -> None:
    text = '{"cluster": {"worker": ["a:1"], "ps": ["b:1"], "worker": ["c:1"]}, "task": {"type": "ps", "index": 0}}'
    with pytest.raises(UsageError, match="here: .*the key 'worker' stands there twice"):
        ClusterResolver.from_json(text, source="here")


@pytest.mark.parametrize("name", ["TF_CONFIG", "WORKBENCH_CLUSTER"])
def test_the_environment_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T9.1, T9.2: a variable that a template has set is respected, one that is empty is none, two have to agree."""
    for each in ("TF_CONFIG", "WORKBENCH_CLUSTER"):
        monkeypatch.setenv(each, config() if each == name else " ")
    found = ClusterResolver.from_environment()
    assert (found.task, found.source) == (Task("worker", 1), name)
    with pytest.raises(UsageError, match=r"neither of WORKBENCH_CLUSTER and TF_CONFIG is set"):
        ClusterResolver.from_environment({"PATH": "/bin"})
    same = {"WORKBENCH_CLUSTER": config(), "TF_CONFIG": config(rpc_layer="grpc")}
    assert ClusterResolver.from_environment(same).source == "WORKBENCH_CLUSTER"
    with pytest.raises(UsageError, match=r"both set and disagree: .*worker.* against .*ps.*Unset the one"):
        ClusterResolver.from_environment({**same, "TF_CONFIG": config("ps", 0)})


def test_one_file_serves_all_machines(tmp_path: Path) -> None:
    """T9.1; a task that is said apart outranks what is written."""
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"cluster": TUTORIAL}))
    found = ClusterResolver.from_environment({"WORKBENCH_CLUSTER": str(path)}, task=Task("ps", 0))
    assert (found.task, found.address, found.source) == (Task("ps", 0), "host4:2222", f"WORKBENCH_CLUSTER={path}")
    assert ClusterResolver.from_json(config(), task=Task("chief")).role == "chief"
    with pytest.raises(UsageError, match='the "task" part'):
        ClusterResolver.from_file(path)
    with pytest.raises(UsageError, match="TF_CONFIG: this is no JSON"):  # others read that variable too, and want JSON
        ClusterResolver.from_environment({"TF_CONFIG": str(path)}, task=Task("ps", 0))
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for name in ("bytes.json", "absent.json"):
        with pytest.raises(UsageError, match=rf"{name}: cannot be read"):
            ClusterResolver.from_file(tmp_path / name)
