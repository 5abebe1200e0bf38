"""Temporary folders of processes that may be killed."""

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

_PREFIX = "workbench-"
_MARKER = ".workbench-temporary"


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Yield a folder of this process that is deleted after use; those of processes that were killed are deleted now.

    Such a folder holds a marker file that its owner keeps locked while it lives, in whichever container that is: one without the file
    is somebody else's, and one whose file is locked is in use.
    """
    for path in Path(gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(path / _MARKER, os.O_NOFOLLOW | os.O_NONBLOCK):
            shutil.rmtree(path, ignore_errors=True)
    with TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as name:
        unlocked = Path(name, f"{_MARKER}-new")
        with contextlib.ExitStack() as lock:
            with contextlib.suppress(OSError):  # a file system without locks: no marker, and nobody deletes it
                lock.enter_context(_locked(unlocked, os.O_CREAT | os.O_EXCL))
                unlocked.rename(Path(name, _MARKER))  # it is never there without its lock
            yield name


@contextlib.contextmanager
def cluster_folder() -> Iterator[str]:
    """Yield a `temporary_folder` for a cluster's logs and sockets; what this process has started for it and still runs ends with it."""
    with temporary_folder() as name:
        try:
            yield name
        finally:
            for children in Path("/proc/self/task").glob("*/children"):
                for pid in children.read_text().split():
                    with contextlib.suppress(OSError):
                        if name.encode() in Path("/proc", pid, "cmdline").read_bytes():
                            os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def _locked(path: Path, flags: int) -> Iterator[None]:
    """Hold the lock of a file, or raise `OSError` where it is not there or another process holds it."""
    file = os.open(path, os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
