"""What a person imports: `workbench/__init__.pyi` and a stub here for each question say where every name lives.

A stub is read when the first of its names is used, so that the import alone brings in neither torch nor matplotlib.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def lazily(module: ModuleType, stub: Path) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a module whose names live where its stub imports them from."""
    homes = _homes(stub)

    def load(name: str) -> Any:
        """Import the module that `name` lives in, and keep what was found."""
        if name not in homes:
            raise AttributeError(f"{module.__name__} has no {name!r}; dir({module.__name__}) lists what there is")
        home, there = homes[name]
        if home == __name__:
            value: Any = namespace(there)
        elif home == "workbench":
            value = importlib.import_module(f"{home}.{there}")
        else:
            value = getattr(importlib.import_module(home), there)
        setattr(module, name, value)
        return value

    return load, lambda: sorted(homes), sorted(homes)


def namespace(name: str) -> ModuleType:
    """Return the names of one question, as `workbench.<name>`."""
    stub = Path(__file__).with_name(f"{name}.pyi")
    made = ModuleType(f"workbench.{name}", ast.get_docstring(ast.parse(stub.read_text(encoding="utf-8"))))
    made.__getattr__, made.__dir__, made.__all__ = lazily(made, stub)  # type: ignore[attr-defined, method-assign]
    return made


@cache
def spelled() -> dict[str, str]:
    """Return how a person writes what is defined under another name, as "LRSweep" -> "wb.lr_sweep.Study"."""
    here = Path(__file__)
    stubs = {"": here.parents[1] / "__init__.pyi"} | {
        f"{path.stem}.": path for path in sorted(here.parent.glob("*.pyi"))
    }
    return {there: f"wb.{prefix}{name}" for prefix, stub in stubs.items() for name, (_, there) in _homes(stub).items()}


def _homes(stub: Path) -> dict[str, tuple[str, str]]:
    """Return public name -> (module, name there)."""
    imports = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}
