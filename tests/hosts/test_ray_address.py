"""An address where no cluster answers is found out in seconds, whatever it is that answers there."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.helpers.workloads import small_workload
from workbench.errors import ClusterError, UsageError
from workbench.ray.address import check_address, only_on_loopback
from workbench.topics.lr_sweep.study import LRSweep


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", ":6379", "host:", "host:x", "host:0", "host:70000", "ray://h:10001"]
)
def test_what_is_no_address_is_wrong_usage(address: str) -> None:
    with pytest.raises(UsageError, match=r"is not understood. Allowed: 'host:port'"):
        check_address(address)


def test_a_closed_port_is_answered_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(
        ClusterError, match=r"no Ray cluster answers at address='127.0.0.1:1'.*refused.*ray start --head"
    ):
        check_address("127.0.0.1:1")
    assert time.monotonic() - start < 5


@pytest.mark.slow
def test_a_port_that_says_nothing_is_given_up() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        start = time.monotonic()
        with pytest.raises(ClusterError, match="the port is open, but it is not that of a ray cluster"):
            check_address(f"127.0.0.1:{server.getsockname()[1]}", answer_s=1.0)
        assert time.monotonic() - start < 15


def test_a_cluster_on_loopback_alone_is_told_from_one_that_others_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as near:
        address = f"127.0.0.1:{near.getsockname()[1]}"
        assert only_on_loopback(address, "127.0.0.2")
        assert not only_on_loopback(address, "127.0.0.1"), "nothing would be asked elsewhere"
        with socket.create_server(("127.0.0.2", near.getsockname()[1])):
            assert not only_on_loopback(address, "127.0.0.2")
    assert not only_on_loopback("192.0.2.1:6379", "192.0.2.1"), "only a loopback address is replaced"


@pytest.mark.slow
def test_auto_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own client waits two minutes for what RAY_ADDRESS or another program's cluster promises."""
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(ClusterError, match="address='auto': none runs on this machine"):
            check_address("auto", answer_s=1.0)
        assert time.monotonic() - start < 60


def test_a_study_at_a_wrong_address_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    start = time.monotonic()
    with pytest.raises(ClusterError, match="127.0.0.1:1"):
        LRSweep(lrs=(0.1,)).run(small_workload(), executor="ray", address="127.0.0.1:1", out=tmp_path / "s")
    assert time.monotonic() - start < 15
    assert not (tmp_path / "s").exists()
