"""`FileWatch`: which files this rank writes (P7.2)."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.topics.hosts.audit.patches import Patches
from workbench.topics.hosts.audit.state import State

__all__ = ["FileWatch"]

_CHECKPOINT = re.compile(r"\.(pt|pth|ckpt|bin|safetensors|distcp)$", re.IGNORECASE)
_NEVER = re.compile(
    r"^/(dev|proc|sys)/|__pycache__|\.(pyc|lock)$|/\.(cache|config|triton|nv)/|torchinductor|/tmp[a-z0-9_]{8}$|"
    rf"/pymp-|^pipe:|^socket:|/torchelastic_|/status-\d+\.\d+\.tmp$|^{re.escape(tempfile.gettempdir())}/[a-z0-9_]{{8}}$"
)
_OWN = re.compile(r"\.?(rank|status|stack|error|draws)-\d")
_WRITING = os.O_WRONLY | os.O_RDWR
MAX_FILES = 2000
_LISTENING: list[FileWatch] = []
"""Python cannot take an audit hook off again, so there is one for good, and watches come and go."""


class FileWatch:
    """Files that are opened for writing, by Python's own audit events, and checkpoints that torch writes (`hosts.writers`).

    Args:
        state: of this rank.
        patches: what is put back when the watch ends.
    """

    def __init__(self, state: State, patches: Patches) -> None:
        self._state = state
        self._files: dict[str, dict[str, Any]] = {}
        self._busy = False
        patches.wrap(torch, "save", self._on_save)
        if "safetensors.torch" in sys.modules:
            patches.wrap(sys.modules["safetensors.torch"], "save_file", self._on_save)
        if not hasattr(sys, "_workbench_file_hook"):
            sys._workbench_file_hook = True  # type: ignore[attr-defined]
            sys.addaudithook(_hook)
        _LISTENING.append(self)
        patches.handle(_Listening(self))

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as JSON values."""
        return {"files": list(self._files.values())}

    def opened(self, path: Any, mode: Any, flags: Any) -> None:
        """Take an audit event in."""
        if self._busy or isinstance(path, int) or path is None or not self._state.here:
            return
        writes = (
            any(c in mode for c in "wax+")
            if isinstance(mode, str)
            else bool(isinstance(flags, int) and flags & _WRITING)
        )
        if writes:
            self._busy = True
            try:
                self.note(path, None)
            finally:
                self._busy = False

    def moved(self) -> None:
        """Take note that the rank is not standing still."""
        self._state.progress += 1

    def note(self, path: Any, kind: str | None) -> None:
        """Write down that a file is opened for writing.

        Args:
            path: of the file.
            kind: "checkpoint"; None is what its name says.
        """
        full = os.path.abspath(os.fsdecode(path))
        if _NEVER.search(full) or (_OWN.match(Path(full).name) and Path(full).parent == self._state.folder):
            return
        found = self._files.get(full)
        if found is None:
            if len(self._files) >= MAX_FILES:
                return
            guessed = "checkpoint" if _CHECKPOINT.search(full) else "log"
            if os.path.isdir(full):  # where a temporary file is made
                return
            found = self._files[full] = {"path": full, "kind": guessed, "times": 0, "step": self._state.step}
            if guessed == "checkpoint" and kind is None:
                self._checkpoint()
        found["kind"] = kind or found["kind"]
        found["times"] += 1

    def _checkpoint(self) -> None:
        for heard in self._state.on_checkpoint:
            heard()

    def _on_save(self, original: Any) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
            if isinstance(path, (str, os.PathLike)) and self._state.here:
                self._state.tick("saving")
                self._checkpoint()
                self.note(path, "checkpoint")
            return original(obj, f, *args, **kwargs)

        return save


class _Listening:
    def __init__(self, watch: FileWatch) -> None:
        self._watch = watch

    def remove(self) -> None:
        if self._watch in _LISTENING:
            _LISTENING.remove(self._watch)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        for watch in _LISTENING:
            watch.opened(*arguments[:3])
    elif event == "import":  # torch loads parts of itself on their first use, which takes seconds
        for watch in _LISTENING:
            watch.moved()
