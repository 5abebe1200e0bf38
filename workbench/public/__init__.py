"""What a person imports: `workbench/__init__.pyi` and a stub here for each question say where every name lives.

A stub is read when the first of its names is used, so that the import alone brings in neither torch nor matplotlib.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["lazily", "namespace"]


def lazily(module: ModuleType, stub: Path) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a module whose names live where its stub imports them from."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}

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
