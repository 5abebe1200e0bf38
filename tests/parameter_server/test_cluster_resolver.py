"""Who this process is, read from a string, a file or the environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parameter_server.test_cluster_spec import TUTORIAL
from workbench.errors import UsageError
from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver
from workbench.parameter_server.cluster.cluster_spec import ClusterSpec, Task


def config(kind: Any = "worker", index: Any = 1, **more: Any) -> str:
    return json.dumps({"cluster": TUTORIAL, "task": {"type": kind, "index": index}, **more})


def test_the_example_of_the_tutorial_is_worker_1() -> None:
    """T9.1, T9.3."""
    found = ClusterResolver.from_json(config())
    assert found.task == Task("worker", 1)
    assert found.cluster_spec == ClusterSpec.from_dict(TUTORIAL)
    assert (found.role, found.address) == ("worker", "host2:2222")


def test_what_templates_add_is_skipped() -> None:
    """T9.2: another layer, an environment, a quoted index."""
    found = ClusterResolver.from_json(config("ps", "1", rpc_layer="grpc", environment="cloud"))
    assert (found.task, found.address) == (Task("ps", 1), "host5:2222")


def test_the_only_coordinator_needs_no_index() -> None:
    text = json.dumps({"cluster": TUTORIAL, "task": {"type": "chief"}})
    assert ClusterResolver.from_json(text).task == Task("chief", 0)


@pytest.mark.parametrize("more", [{}, {"cluster": None}, {"cluster": {}}, {"cluster": {"evaluator": ["host7:2222"]}}])
def test_an_evaluator_needs_no_cluster(more: dict[str, Any]) -> None:
    """T9.4, T1.10."""
    found = ClusterResolver.from_json(json.dumps({"task": {"type": "evaluator", "index": 0}, **more}))
    assert (found.role, found.cluster_spec, found.address) == ("evaluator", None, None)


def test_an_evaluator_may_know_the_cluster_and_stays_outside() -> None:
    """Behaviour 67, T1.10, T9.4: the same text makes any other task refuse it."""
    jobs = {**TUTORIAL, "evaluator": ["host7:2222"]}
    found = ClusterResolver.from_json(json.dumps({"cluster": jobs, "task": {"type": "evaluator", "index": 0}}))
    assert (found.cluster_spec, found.address) == (ClusterSpec.from_dict(TUTORIAL), None)
    with pytest.raises(UsageError, match="Disallowed task type 'evaluator'"):
        ClusterResolver.from_json(json.dumps({"cluster": jobs, "task": {"type": "chief", "index": 0}}))


@pytest.mark.parametrize("kind", ["foobar", "coordinator", "", None, ["worker"]])
def test_an_unknown_task_type_is_an_error(kind: Any) -> None:
    """Behaviour 66, T9.5."""
    with pytest.raises(UsageError, match="TF_CONFIG: Unrecognized task type"):
        ClusterResolver.from_json(config(kind), source="TF_CONFIG")


@pytest.mark.parametrize("task", [{}, {"task": None}, {"task": {}}, {"task": {"index": 0}}, {"task": "worker"}])
def test_a_missing_task_is_an_error(task: dict[str, Any]) -> None:
    """T9.5: nobody is taken for the coordinator because nothing was said."""
    with pytest.raises(UsageError, match=r'the "task" part must say which task this process is.*--role'):
        ClusterResolver.from_json(json.dumps({"cluster": TUTORIAL, **task}))


def test_a_worker_needs_its_index() -> None:
    text = json.dumps({"cluster": TUTORIAL, "task": {"type": "worker"}})
    with pytest.raises(UsageError, match="index=None of the worker task must be an integer"):
        ClusterResolver.from_json(text)


@pytest.mark.parametrize(("kind", "index"), [("worker", 3), ("ps", 2)])
def test_a_task_that_is_not_in_the_cluster(kind: str, index: int) -> None:
    """T1.8, T1.9."""
    with pytest.raises(UsageError, match=rf"to be {kind} {index}, and the cluster has {kind} 0 to {index - 1}"):
        ClusterResolver.from_json(config(kind, index))


@pytest.mark.parametrize("kind", ["chief", "worker", "ps"])
def test_whoever_trains_needs_the_cluster(kind: str) -> None:
    """T1.8, T1.9."""
    with pytest.raises(UsageError, match=rf'{kind} 0 needs the "cluster" part.*Only an evaluator goes without'):
        ClusterResolver.from_json(json.dumps({"task": {"type": kind, "index": 0}}))


@pytest.mark.parametrize("text", ["", "nonsense", "{", "[1]", "3", "null", '"worker"'])
def test_what_is_no_such_json(text: str) -> None:
    with pytest.raises(UsageError, match=r"here: .*(this is no JSON|must be an object).*Example: \{"):
        ClusterResolver.from_json(text, source="here")


def test_a_key_that_stands_there_twice_is_not_lost() -> None:
    text = '{"cluster": {"worker": ["a:1"], "ps": ["b:1"], "worker": ["c:1"]}, "task": {"type": "ps", "index": 0}}'
    with pytest.raises(UsageError, match="here: the key 'worker' stands there twice"):
        ClusterResolver.from_json(text, source="here")


@pytest.mark.parametrize("name", ["TF_CONFIG", "WORKBENCH_CLUSTER"])
def test_the_environment_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T9.1, T9.2: a variable that a template has set is respected; one that is empty is none."""
    other = {"TF_CONFIG": "WORKBENCH_CLUSTER", "WORKBENCH_CLUSTER": "TF_CONFIG"}[name]
    monkeypatch.setenv(name, config())
    monkeypatch.setenv(other, " ")
    found = ClusterResolver.from_environment()
    assert (found.task, found.source) == (Task("worker", 1), name)


def test_nothing_in_the_environment_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"neither of WORKBENCH_CLUSTER and TF_CONFIG is set. Set one, for example"):
        ClusterResolver.from_environment({"PATH": "/bin"})


def test_two_variables_have_to_agree() -> None:
    """T9.2: a TF_CONFIG that is there is not passed over in silence."""
    same = {"WORKBENCH_CLUSTER": config(), "TF_CONFIG": config(rpc_layer="grpc")}
    assert ClusterResolver.from_environment(same).source == "WORKBENCH_CLUSTER"
    with pytest.raises(UsageError, match=r"are both set and disagree: worker 1 in .* against ps 0 in .*Unset the one"):
        ClusterResolver.from_environment({**same, "TF_CONFIG": config("ps", 0)})


def test_the_task_may_be_said_apart(tmp_path: Path) -> None:
    """One file for all machines, T9.1; what is said outranks what is written."""
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"cluster": TUTORIAL}))
    found = ClusterResolver.from_environment({"WORKBENCH_CLUSTER": str(path)}, task=Task("ps", 0))
    assert (found.task, found.address, found.source) == (Task("ps", 0), "host4:2222", f"WORKBENCH_CLUSTER={path}")
    assert ClusterResolver.from_json(config(), task=Task("chief")).role == "chief"
    with pytest.raises(UsageError, match='the "task" part'):
        ClusterResolver.from_file(path)
    with pytest.raises(UsageError, match="TF_CONFIG: this is no JSON"):  # others read that variable too, and want JSON
        ClusterResolver.from_environment({"TF_CONFIG": str(path)}, task=Task("ps", 0))


def test_a_yaml_file(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "cluster.yaml"
    lines = [f"  {job}: [{', '.join(addresses)}]" for job, addresses in TUTORIAL.items()]
    path.write_text("\n".join(["cluster:", *lines, "task: {type: worker, index: 1}"]))
    found = ClusterResolver.from_file(path)
    assert (found.cluster_spec, found.task) == (ClusterSpec.from_dict(TUTORIAL), Task("worker", 1))
    path.write_text("cluster: [")
    with pytest.raises(UsageError, match=rf"{path}: this is no YAML"):
        ClusterResolver.from_file(path)


def test_yaml_without_its_package_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text("task: {type: evaluator}")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match="reading YAML needs PyYAML. Install it, or write the same as JSON"):
        ClusterResolver.from_file(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent.json: cannot be read"):
        ClusterResolver.from_file(tmp_path / "absent.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"bytes.json: cannot be read"):
        ClusterResolver.from_file(tmp_path / "bytes.json")
    with pytest.raises(UsageError, match=r"WORKBENCH_CLUSTER=.*nowhere.*cannot be read"):
        ClusterResolver.from_environment({"WORKBENCH_CLUSTER": str(tmp_path / "nowhere")})


def test_without_a_task_there_is_no_role() -> None:
    """T9.5: a notebook that makes its own cluster has none, and asking for it is an error."""
    resolver = ClusterResolver(ClusterSpec.from_dict(TUTORIAL))
    assert resolver.address is None
    with pytest.raises(UsageError, match=r"not said which task this process is. Give --role worker --index 0"):
        _ = resolver.role
