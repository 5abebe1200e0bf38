"""Temporary folders of processes that may be killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

__all__ = ["temporary_folder"]

_PREFIX = "workbench-"


def temporary_folder() -> TemporaryDirectory[str]:
    """Return a folder of this process that is deleted after use; those of processes that were killed are deleted now."""
    for path in Path(gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
    return TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", ignore_cleanup_errors=True)
