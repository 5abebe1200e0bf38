"""Workbench: is this training healthy, and what should I try next?

    import workbench as wb

    workload = wb.load_workload("digits_cnn")
    record = wb.lr_sweep.Study(seeds=1).run(workload, out="runs/sweep")
    diagnosis = wb.lr_sweep.diagnose(record)
    wb.lr_sweep.plot(record, diagnosis)

Every question answers to `Study`, `diagnose`, `plot` and, where there is one, `panel`. Names load when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from workbench.lazy import imported_names, lazily

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi")
__getattr__, __dir__ = lazily(__name__, _STUB)
__all__ = [*imported_names(_STUB), "__version__"]  # noqa: PLE0604


def _show(record: Any) -> None:
    importlib.import_module("workbench.views.summary").show_study(record)


def _show_records_in_notebooks() -> None:
    """Let a notebook draw a record that is the last line of a cell, such as `wb.open("runs/one")`."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        for name in ("StudyRecord", "TrialRecord"):
            shell.display_formatter.ipython_display_formatter.for_type_by_name("workbench.record.read", name, _show)


_show_records_in_notebooks()
