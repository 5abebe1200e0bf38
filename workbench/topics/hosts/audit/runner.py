"""`python -m workbench.topics.hosts.audit.runner FOLDER TIMEOUT_S STEPS TARGET ...`: a training script of the user's own, observed.

The script is run as `python script.py ...` would: under the name `__main__`, with its own folder in front of the path.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

from workbench.topics.hosts.audit.watch import HostsWatch

__all__ = ["error_path", "main"]


def error_path(folder: Path, rank: int) -> Path:
    """Return the file in which a rank says what ended it."""
    return folder / f"error-{rank}.json"


def main(words: list[str]) -> None:
    """Run a script or a module of this rank.

    Args:
        words: folder of the facts, seconds without progress, updates at most or "-", "path/to/script.py" or "-m", then the
            name of the module behind "-m", and the script's own arguments.
    """
    folder, timeout_s, steps, target, *rest = words
    most = None if steps == "-" else int(steps)
    watch = HostsWatch(Path(folder), timeout_s=float(timeout_s), stop_after=most, launched=True)
    try:
        if target == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [target, *rest]
            sys.path[0] = str(Path(target).resolve().parent)
            runpy.run_path(target, run_name="__main__")
        watch.close()
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            _write(watch, error)
        watch.close(error=error)
        raise


def _write(watch: HostsWatch, error: BaseException) -> None:
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "runpy" not in f.filename and __file__ != f.filename
    ]
    rank = watch.state.rank
    row = {
        "rank": rank, "time": time.time(), "pid": os.getpid(), "step": watch.state.step, "phase": watch.state.phase,
        "kind": type(error).__name__, "text": str(error),
        "frames": [[f.filename, f.lineno, f.name] for f in frames],
        "traceback": "".join(traceback.format_exception(error)),
    }  # fmt: skip
    error_path(watch.state.folder, rank).write_text(json.dumps(row), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
