"""Workbench: is this training healthy, and what should I try next?

    import workbench as wb

    workload = wb.load_workload("digits_cnn")
    record = wb.LRSweep(seeds=1).run(workload, out="runs/sweep")
    diagnosis = wb.diagnose_lr_sweep(record)
    wb.plot_lr_sweep(record, diagnosis)

Names load when they are first used, so that the import alone brings in neither torch nor matplotlib; `__init__.pyi` says where each lives.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    alias.asname or alias.name: (str(node.module), alias.name)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Public name -> (module, name there)."""

__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Import the module that `name` lives in, and keep what was found."""
    if name not in _HOMES:
        raise AttributeError(f"workbench has no {name!r}; dir(workbench) lists what there is")
    module, there = _HOMES[name]
    globals()[name] = value = getattr(importlib.import_module(module), there)
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return list(__all__)


def _show(record: Any) -> None:
    importlib.import_module("workbench.views.summary").show_study(record)


def _show_records_in_notebooks() -> None:
    """Let a notebook draw a record that is the last line of a cell, such as `wb.open("runs/one")`."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        for name in ("StudyRecord", "TrialRecord"):
            shell.display_formatter.ipython_display_formatter.for_type_by_name("workbench.record.read", name, _show)


_show_records_in_notebooks()
