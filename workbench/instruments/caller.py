"""Where in a person's own code a call was made."""

from __future__ import annotations

import functools
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any

_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of installed packages, wherever they lie: a path file or PYTHONPATH may name those of another environment."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = tuple(
    {os.path.join(os.path.abspath(path), "") for path in (*site.getsitepackages(), site.getusersitepackages())}
    | {os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib", "stdlib")}
)


def own_line(frame: FrameType | None = None) -> str:
    """Return "file.py:31" of the innermost frame that belongs neither to this package nor to an installed one; "" where there is none."""
    own = _own_frame(frame or inspect.currentframe())
    return "" if own is None else _place(own.f_code.co_filename, own.f_lineno)


def _own_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and shown(frame.f_code.co_filename) is None:
        frame = frame.f_back
    return frame


def show_warning(
    original: Callable[..., None], message: Warning | str, kind: type[Warning], path: str, line: int, *given: Any
) -> None:
    """Show a warning as `warnings.showwarning` does, at a person's own line where it was attributed to a wrapper of this package."""
    own = _own_frame(inspect.currentframe()) if path.startswith(_PACKAGE) else None
    original(message, kind, *((path, line) if own is None else (own.f_code.co_filename, own.f_lineno)), *given)


def begins_at(*functions: Any) -> str:
    """Return "file.py:31" where the first of these functions, or objects that are called, begins that is a person's own; "" where none is."""
    for given in functions:
        function = getattr(given, "func", given)  # of a partial one
        codes = (getattr(each, "__code__", None) for each in (function, type(function).__call__))
        if (code := next(filter(None, codes), None)) and (place := _place(code.co_filename, code.co_firstlineno)):
            return place
    return ""


def _place(path: str, line: int) -> str:
    place = shown(path)
    return "" if place is None else f"{place}{_number(path) if place == 'cell' else ''}:{line}"


def _number(path: str) -> str:
    """Return " 3" for a file that stands for the cell In [3], as it was run last; "" where IPython does not know it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    known = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(path)  # ("Cell", "In[3]")
    return f" {known[1][3:-1]}" if known else ""


@functools.cache
def shown(path: str) -> str | None:
    """Return how a file of a person's own is named, None for one of this package or an installed one."""
    if path.startswith((_PACKAGE, *_INSTALLED, "<frozen", "<string>")) or any(each in path for each in _LIBRARIES):
        return None
    if "ipykernel" in path or path.startswith("<"):
        return "cell"
    near = os.path.relpath(path) if os.path.isabs(path) else path
    return os.path.basename(path) if near.startswith("..") else near


def importing_packages() -> list[str]:
    """Return the installed packages in whose code this call is made, as where the import of one of them leads here."""
    found, frame = [], inspect.currentframe()
    while frame is not None:
        if any(each in frame.f_code.co_filename for each in _LIBRARIES):
            found.append(str(frame.f_globals.get("__name__", "")).partition(".")[0])
        frame = frame.f_back
    return list(dict.fromkeys(found))
