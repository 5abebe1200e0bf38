"""What is left when tests of clusters have ended: nothing, also where a test failed in the middle (T2.1)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

from tests.helpers.leftovers import Leftovers


def test_a_leftover_of_each_kind_is_seen() -> None:
    """Or the check at the end of these tests would see nothing."""
    before, go = Leftovers(), threading.Event()
    assert before.found(0.0) == []
    name = f"workbench-test-{uuid.uuid4().hex}"
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    thread = threading.Thread(target=go.wait, name="planted thread")
    thread.start()
    folder = Path(tempfile.mkdtemp(prefix=f"workbench-{os.getpid()}-"))
    file, server = Path("/dev/shm", name), socket.create_server(("127.0.0.1", 0))
    file.touch()
    try:
        found = "\n".join(before.found(0.0))
    finally:
        go.set()
        thread.join()
        file.unlink()
        folder.rmdir()
        port = server.getsockname()[1]
        server.close()
        process.communicate(b"\n")
    for planted in (f"process {process.pid}", "planted thread", str(folder), str(file), f"port {port}"):
        assert planted in found
    assert before.found(10.0) == []
