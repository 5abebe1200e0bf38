"""Reading the stacks that `faulthandler` writes, and showing them in a line."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Frame", "own_frames", "shown"]

Frame = tuple[str, int, str]
"""File, line and function."""

_FRAME = re.compile(r'^\s*File "(.+)", line (\d+) in (.+)$')
_NOT_THE_USERS = ("/torch/", "/workbench/topics/hosts/audit/", "/runpy.py", "<frozen", "/threading.py")
_STANDARD = sysconfig.get_path("stdlib")


def own_frames(text: str) -> list[Frame]:
    """Return the frames of the main thread, the innermost first.

    Args:
        text: as `faulthandler` writes it: thread by thread, the most recent call first, the main thread last.
    """
    blocks = [
        block for block in re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE) if "File " in block
    ]
    threads = [[_frame(line) for line in block.splitlines() if _FRAME.match(line)] for block in blocks]
    mains = [frames for frames in threads if (frames and frames[-1][2] == "<module>") or "runpy" in str(frames[-1:])]
    return (mains or threads or [[]])[-1]


def _frame(line: str) -> Frame:
    match = _FRAME.match(line)
    assert match is not None
    return match[1], int(match[2]), match[3]


def _elsewhere(file: str) -> bool:
    """Tell whether a file is Python's, torch's or the audit's."""
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return standard or any(part in file for part in _NOT_THE_USERS)


def shown(frames: Sequence[Frame], *, most: int = 3) -> str:
    """Return the innermost frames of the user's own code as `file:line function`; others where there are no such.

    Args:
        frames: the innermost first.
        most: frames shown.
    """
    own = [frame for frame in frames if not _elsewhere(frame[0])]
    kept = (own or list(frames))[:most]
    return " < ".join(f"{Path(file).name}:{line} {name}" for file, line, name in kept) or "an unknown place"
