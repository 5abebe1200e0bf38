"""Who writes a study: one process at a time holds its folder, and lets it go when it ends, however it ends."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

from workbench.errors import RecordError

__all__ = ["is_locked", "lock"]


TRIES = 3  # a reader that asks whether somebody writes holds the file for a moment


def lock(path: Path) -> IO[str]:
    """Hold the folder for this process until the returned file is closed.

    Raises:
        RecordError: another process holds it.
    """
    try:
        file = (path / ".lock").open("w")
    except OSError as error:
        raise RecordError(
            f"cannot write {path / '.lock'}: {error.strerror}. Give another folder with out=..."
        ) from error
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if left:
                time.sleep(0.05)
                continue
            file.close()
            raise RecordError(
                f"another process is writing {path}. Wait for it, interrupt it, or give another folder; "
                "a running study can be read with workbench.open()."
            ) from error
    return file


def is_locked(path: Path) -> bool:
    """Tell whether a process is writing this study now; this one counts. Nothing is created, and no writer is kept out for long."""
    try:
        with (path / ".lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
