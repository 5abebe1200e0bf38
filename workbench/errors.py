"""The exception tree and the one way a mistyped name is answered.

Every error names the argument, the value that was given, what is allowed and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "DeviceError",
    "NotebookError",
    "RecordError",
    "StudyInterrupted",
    "UnknownNameError",
    "UsageError",
    "WorkbenchError",
    "WorkloadError",
    "nearest",
]


class WorkbenchError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(WorkbenchError, ValueError):
    """An argument of a function or a command line is out of its range (exit code 2)."""


class ConfigError(UsageError):
    """A `TrainConfig` field, or a threshold, has a value outside what is allowed."""


class UnknownNameError(UsageError, LookupError):
    """A workload, optimizer, schedule, field, notebook or parameter that does not exist."""


class WorkloadError(WorkbenchError):
    """The workload itself is broken: model, data, loss or the module it lives in."""


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
    """Ctrl-C or the Interrupt button, after everything was saved; the same call goes on from there."""


def nearest(given: object, allowed: Iterable[str]) -> str:
    """Return `" Did you mean 'x'? Allowed: ..."` for a name that is not among `allowed`."""
    names = sorted(allowed)
    close = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Allowed: {', '.join(names)}."
