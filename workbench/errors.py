"""The exception tree and the one way a mistyped name is answered."""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = [
    "CheckpointError", "ClusterError", "ConfigError", "DataError", "DeviceError", "NotebookError", "RecordError",
    "StudyInterrupted", "TargetError", "UnknownNameError", "UsageError", "WorkbenchError", "WorkloadError",
]  # fmt: skip


class WorkbenchError(Exception):
    """Base of every error that this package raises on purpose."""

    @property
    def _render_traceback_(self) -> Callable[[], list[str]]:
        """What a notebook asks for in place of a traceback: the message, and the caller's own lines.

        Where the cause lies in the caller's code, as in a model, or with WORKBENCH_DEBUG=1, there is the whole traceback:
        this attribute is then missing.
        """
        if _in_callers_code(self.__cause__) or os.environ.get("WORKBENCH_DEBUG") == "1":
            raise AttributeError("_render_traceback_")
        told = []
        for frame in callers_frames(self):
            path = Path(frame.filename)
            of_cell = path.parent.name.startswith("ipykernel_")
            place = f"line {frame.lineno} of the cell" if of_cell else f"{frame.filename}, line {frame.lineno}"
            told.append(f"  {place}: {frame.line}")
        return lambda: [f"{type(self).__name__}: {self}", *told]


class UsageError(WorkbenchError, ValueError):
    """An argument of a function or a command line is out of its range (exit code 2)."""


class ConfigError(UsageError):
    """A `TrainConfig` field, or a threshold, has a value outside what is allowed."""


class UnknownNameError(UsageError, LookupError):
    """A workload, optimizer, schedule, field, notebook or parameter that does not exist."""


class WorkloadError(WorkbenchError):
    """The workload itself is broken: model, data, loss or the module it lives in."""


class TargetError(WorkloadError):
    """A target is no class that the model has an output for."""


class DataError(WorkloadError):
    """A dataset is empty, too small, or one of its items raised; the item's index is named."""


class DeviceError(UsageError):
    """A device was asked for that this machine does not have."""


class RecordError(WorkbenchError):
    """A study folder cannot be written, is damaged, or holds another study."""


class CheckpointError(RecordError):
    """A checkpoint is missing, truncated, or does not fit the model."""


class ClusterError(WorkbenchError):
    """No Ray cluster answers, or it loses its workers again and again."""


class NotebookError(WorkbenchError):
    """A notebook did not run to its end."""


class StudyInterrupted(KeyboardInterrupt):
    """Ctrl-C or the Interrupt button, after everything was saved; the same call resumes from there."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows in place of a traceback through the trainer: nothing went wrong."""
        return [f"{type(self).__name__}: {self}"]


_PACKAGE = Path(__file__).parent
_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


def _in_callers_code(cause: BaseException | None) -> bool:
    return cause is not None and (bool(callers_frames(cause)) or _in_callers_code(cause.__cause__))


def callers_line(error: BaseException) -> str:
    """Return the line of the caller's code that raised, as `" (net.py, line 31: x = self.fc(x))"`; "" where there is none."""
    found = callers_frames(error)
    return f" ({Path(found[-1].filename).name}, line {found[-1].lineno}: {found[-1].line})" if found else ""


def in_one_line(error: BaseException) -> str:
    """Return what an error says as part of a sentence: its type, where that is not this package's, and its first line."""
    said = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    return said if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {said}{callers_line(error)}"


def callers_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback that are neither this package's nor a library's."""
    places = [_PACKAGE, *_LIBRARIES]
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(("<frozen", "<string>"))]
    return [f for f in theirs if not any(place in Path(f.filename).parents for place in places)]


def nearest(given: object, allowed: Iterable[str], *, listed: str = "Allowed", most: int | None = None) -> str:
    """Return `" Did you mean 'x'? Allowed: ..."` for a name that is not among `allowed`, of which the first `most` are named."""
    names = sorted(allowed)
    close = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    more = f" and {len(names) - most} more" if most and len(names) > most else ""
    return f"{hint} {listed}: {', '.join(names[:most])}{more}."
