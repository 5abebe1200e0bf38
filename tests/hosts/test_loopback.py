"""Who listens where: what is rehearsed on this machine cannot be reached from another one."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from workbench.topics.hosts.launch import launch
from workbench.topics.hosts.run_rank import LoopbackStore

TABLES = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
pytestmark = pytest.mark.skipif(not TABLES[0].exists(), reason="only Linux shows who listens")
SCRIPT = """
import os, pathlib
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
own = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
for table in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        words = line.split()
        address, port = words[1].split(":")
        if words[3] == "0A" and (int(words[9]) in own or int(port, 16) == int(os.environ["MASTER_PORT"])):
            print("listens", address, "store" if int(words[9]) not in own else "own")
dist.barrier()
dist.destroy_process_group()
"""
"""Prints the addresses on which this rank listens, and those of the store."""


def listening(port: int) -> set[str]:
    """The local addresses, in hexadecimal, on which somebody listens at a port."""
    rows = [line.split() for table in TABLES if table.exists() for line in table.read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


def test_a_store_listens_on_the_loopback_interface_alone_and_works() -> None:
    server = LoopbackStore("127.0.0.1", 0, None, True, timedelta(seconds=20), multi_tenant=True)
    assert listening(server.port) == {"0100007F"}
    client = LoopbackStore("127.0.0.1", server.port, None, False, timedelta(seconds=20))
    client.set("key", "value")
    assert server.get("key") == b"value"


def test_torchs_own_listens_everywhere() -> None:
    """Why there is another one; where this fails one day, it is not needed any more."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)  # type: ignore[attr-defined]
    assert listening(server.port) & {"00000000", "0" * 32}


def test_a_port_that_is_taken_is_the_error_that_torch_raises() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(RuntimeError, match="cannot be used"):
            LoopbackStore("127.0.0.1", other.getsockname()[1], None, True)


@pytest.mark.slow
def test_nothing_of_a_job_listens_elsewhere(tmp_path: Path) -> None:
    script = tmp_path / "listens.py"
    script.write_text(SCRIPT)
    printed = launch([str(script)], hosts=2, folder=tmp_path / "job").printed
    for lines in printed.values():
        found = [line.split()[1:] for line in lines if line.startswith("listens")]
        assert {address for address, _ in found} == {"0100007F"}
        assert {whose for _, whose in found} == {"own", "store"}
