"""What a worker tells the study's one writer, in the order in which it happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Advanced", "Dropped", "Ended", "Event", "Facts", "Message", "Rewind", "Rows", "Saved"]


@dataclass(frozen=True)
class Rows:
    """A block of rows for one of the study's tables, column by column."""

    table: Literal["steps", "evals", "predictions"]
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Rewind:
    """A trial goes on from `step`: its rows of that step and later come again."""

    trial: int
    step: int


@dataclass(frozen=True)
class Event:
    """A line for a trial's events."""

    trial: int
    event: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written; all rows before it have been sent."""

    trial: int
    name: str
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Dropped:
    """A checkpoint is no longer among those that are kept."""

    trial: int
    name: str


@dataclass(frozen=True)
class Facts:
    """What was measured on the live model."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Advanced:
    """So many more updates were made."""

    steps: int


@dataclass(frozen=True)
class Ended:
    """The worker's last word about a chunk.

    Attributes:
        state: "done"; "stopped" where it was asked to; "failed" where an error was raised.
        kind: the error's class, by name.
        said: its message.
        details: its notes and traceback.
    """

    state: Literal["done", "stopped", "failed"] = "done"
    kind: str = ""
    said: str = ""
    details: str = ""


Message = Rows | Rewind | Event | Saved | Dropped | Facts | Advanced | Ended
