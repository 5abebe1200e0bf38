"""Names that are imported when they are first used, so that `import workbench` brings in neither torch nor matplotlib.

A module says in plain imports where its public names live: `workbench/__init__.pyi` does, and the `topic.py` of a
question for its names that need torch or widgets, under `if TYPE_CHECKING`. Type checkers read the same imports.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from workbench.errors import UsageError
from workbench.progress import finished_first, interruptible


def lazily(module: str, source: str | Path) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module whose names live where the file `source` imports them from."""
    homes = imported_names(Path(source))

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"{module} has no {name!r}{_near(name, homes)}")
        home, there = homes[name]
        with interruptible(), finished_first():
            found = vars(importlib.import_module(home))
            value = found[there] if there in found else importlib.import_module(f"{home}.{there}")
        if there == "topic":
            _refuse_paths(f"wb.{name}", value)
        setattr(sys.modules[module], name, value)
        return value

    return load, lambda: sorted(sys.modules[module].__all__)


def _refuse_paths(name: str, topic: Any) -> None:
    """Let a topic's functions of a record say what to give them in the place of its path."""

    def refusing(spelled: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def of_record(*args: Any, **more: Any) -> Any:
            for given in args:
                if isinstance(given, str | Path):
                    raise UsageError(f"{spelled} takes a record, not its path: {spelled}(wb.open({str(given)!r})).")
            return function(*args, **more)

        return of_record

    for each in ("diagnose", "plot"):
        if function := vars(topic).get(each):
            setattr(topic, each, refusing(f"{name}.{each}", function))


def _near(name: str, homes: dict[str, tuple[str, str]]) -> str:
    """Return the public name nearest to one that is missing; a class is found by its own name, too, as LRSweep is wb.lr_sweep.Study."""
    spelled = {there.lower(): how for there, how in public_spelling().items()} | {name.lower(): name for name in homes}
    close = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.6)
    return f"; did you mean {spelled[close[0]]}?" if close else "; dir() of it lists what there is"


@cache
def imported_names(source: Path) -> dict[str, tuple[str, str]]:
    """Return name -> (module, name there) of everything that a file imports by `from ... import`."""
    imports = [n for n in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(n, ast.ImportFrom)]
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}


@cache
def public_spelling() -> dict[str, str]:
    """Return how a person writes what is defined under another name, as "LRSweep" -> "wb.lr_sweep.Study"."""
    package = Path(__file__).parent
    own: dict[str, str] = {}
    of_topics: dict[str, str] = {}
    for name, (home, there) in imported_names(package / "__init__.pyi").items():
        own[there] = f"wb.{name}"
        if there == "topic":
            names = imported_names(package.parent.joinpath(*home.split("."), "topic.py"))
            of_topics |= {defined: f"wb.{name}.{public}" for public, (_, defined) in names.items()}
    return of_topics | own  # what a topic imports for its own use is spelled as the package has it
