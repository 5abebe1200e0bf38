"""A cluster of processes on several machines: who may do what, and what is said where they do not find each other."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from workbench.cli import main
from workbench.errors import ClusterError, UsageError
from workbench.parameter_server.cluster.cluster import connect_to_cluster, serve_task
from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver
from workbench.ray import node as ray_node
from workbench.ray.address import is_loopback
from workbench.ray.node import own_address, reach

SPEC = {"chief": ["127.0.0.1:2220"], "worker": ["127.0.0.1:2221"], "ps": ["127.0.0.1:2222"]}
NOWHERE = "203.0.113.1"  # kept for examples: no machine has it (RFC 5737)


def resolver(kind: str, **jobs: Any) -> ClusterResolver:
    return ClusterResolver.from_json(json.dumps({"cluster": SPEC | jobs, "task": {"type": kind, "index": 0}}))


def test_each_task_does_its_own() -> None:
    """T1.9, T1.10: only the chief connects, only workers and servers serve, an evaluator never joins."""
    for kind in ("worker", "ps", "evaluator"):
        with pytest.raises(UsageError, match=f"this process is {kind} 0"):
            connect_to_cluster(resolver(kind))
    for kind in ("chief", "evaluator"):
        with pytest.raises(UsageError, match=f"this process is the {kind}"):
            serve_task(resolver(kind))
    with pytest.raises(UsageError, match='Add "chief"'):
        serve_task(resolver("worker", chief=[]))


@pytest.mark.parametrize(
    ("where", "numbers", "match"),
    [
        ("127.0.0.1:6379", {"num_workers": 2}, "needs num_workers and num_ps"),
        (resolver("chief"), {"num_workers": 2}, "has its own"),
        ("nonsense", {"num_workers": 1, "num_ps": 1}, "host:port"),
    ],
)
def test_numbers_are_said_once(where: Any, numbers: dict[str, int], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        connect_to_cluster(where, **numbers)


def test_an_address_that_is_not_free_here_is_told_at_once() -> None:
    with pytest.raises(ClusterError, match=f"{NOWHERE} is not an address of this machine"):
        own_address(NOWHERE, 2222)
    with pytest.raises(ClusterError, match="'no-such-host.invalid' is not known here"):
        own_address("no-such-host.invalid", 2222)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {port} is taken"):
            own_address("127.0.0.1", port)
    assert own_address("localhost", port) == "127.0.0.1"


def test_a_chief_that_is_not_there_yet_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as chief:
        port = chief.getsockname()[1]
        reach(("127.0.0.1", port), 1.0)
    begun = time.monotonic()
    with pytest.raises(ClusterError, match=f"127.0.0.1:{port} was not reached in 1 s.*Was the chief started"):
        reach(("127.0.0.1", port), 1.0)
    assert time.monotonic() - begun >= 1.0


def test_a_machine_that_cannot_be_reached_is_given_up_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 15 s whatever `wait_s` allows, where nothing comes back at all."""
    assert ray_node.UNREACHABLE_S + ray_node.CONNECT_S < 15

    def unanswered(*_: object, **__: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(ray_node.socket, "create_connection", unanswered)
    monkeypatch.setattr(ray_node, "UNREACHABLE_S", 0.3)
    with pytest.raises(ClusterError, match="Is the address right"):
        reach((NOWHERE, 2222), 3600.0)


def test_a_name_that_becomes_known_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """T9.2: on Kubernetes a task may start before its own name, and the chief's, can be looked up."""
    known, real, asked = time.monotonic() + 0.5, socket.getaddrinfo, [0]

    def late(host: str, *args: Any, **kwargs: Any) -> Any:
        asked[0] += 1
        if time.monotonic() < known:
            raise socket.gaierror(-2, "Name or service not known")
        return real("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(ray_node, "UNREACHABLE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as chief:
        reach(("chief-0.train", chief.getsockname()[1]), 10.0)
    assert asked[0] > 1
    known = time.monotonic() + 0.5
    assert own_address("worker-0.train", 0, 10.0) == "127.0.0.1"
    known = math.inf
    with pytest.raises(ClusterError, match="chief-0.train:1 was not reached in .*its name is not known here"):
        reach(("chief-0.train", 1), 0.3)


def test_what_nobody_else_can_reach() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "[::1]", "localhost")))
    assert not any(map(is_loopback, (NOWHERE, "host1")))


_TOKEN = """
import sys
from workbench.errors import ClusterError
from workbench.ray.address import require_token
try:
    require_token(alone=sys.argv[1] == "alone")
except ClusterError as error:
    print("refused:", error)
"""


def test_no_cluster_without_a_token(tmp_path: Path) -> None:
    """On one machine one is made, for its owner only; several machines have to be given the same one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": str(tmp_path)
    }

    def run(word: str) -> str:
        command = [sys.executable, "-c", _TOKEN, word]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout

    assert "RAY_AUTH_TOKEN_PATH" in run("many")
    token = tmp_path / ".ray" / "auth_token"
    assert not token.exists()
    assert run("alone") == ""
    made = token.read_text()
    assert len(made) >= 32
    assert token.stat().st_mode & 0o077 == 0
    assert run("alone") == run("many") == ""
    assert token.read_text() == made


CLUSTER = ["--cluster", json.dumps({"cluster": SPEC})]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "neither of WORKBENCH_CLUSTER and TF_CONFIG is set"),
        (CLUSTER, "must say which task this process is"),
        ([*CLUSTER, "--role", "master"], "Unrecognized task type 'master'"),
        ([*CLUSTER, "--role", "worker"], "needs --index N"),
        ([*CLUSTER, "--index", "0"], "needs --role"),
        ([*CLUSTER, "--role", "worker", "--index", "1"], "has 1 of type 'worker'"),
        ([*CLUSTER, "--role", "chief"], "the chief needs one WORKLOAD"),
        ([*CLUSTER, "--role", "chief", "--script", "no_such.py"], "there is no such file"),
        ([*CLUSTER, "--role", "chief", "--steps", "0", "digits_mlp"], "must be at least 1"),
        (["--role", "evaluator"], "the evaluator needs one WORKLOAD"),
    ],
)
def test_wrong_usage_of_the_command(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T9.5: an unknown role is never the coordinator."""
    for name in ("WORKBENCH_CLUSTER", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert main(["ps", *words]) == 2
    assert said in capsys.readouterr().err
