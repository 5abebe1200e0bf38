"""`import workbench` is light, and every public name is where the type checker thinks it is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import workbench

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "ray", "papermill", "ipywidgets", "matplotlib", "pandas", "numpy", "optuna", "pyarrow", "sklearn"}


def loaded_after(program: str) -> set[str]:
    command = [sys.executable, "-c", f"import sys\n{program}\nprint(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_the_import_brings_nothing_heavy() -> None:
    assert loaded_after("import workbench; dir(workbench)") & HEAVY == set()


def test_diagnosing_and_records_do_not_bring_torch() -> None:
    loaded = loaded_after("import workbench; workbench.open, workbench.Finding, workbench.clipping.diagnose")
    assert "torch" not in loaded
    assert {"numpy", "pandas"} <= loaded, "the check can see a heavy import"


def test_version_is_that_of_the_project() -> None:
    assert workbench.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


QUESTIONS = {
    "architecture", "batch_norm", "batch_size", "checkpoints", "clipping", "comparison", "data", "evaluation",
    "hosts", "input", "loop", "lr_sweep", "optimizers", "periodicity", "predictions", "ps", "schedule", "stability",
    "tracking", "warmup",
}  # fmt: skip
STUDIES = QUESTIONS - {"data", "loop", "periodicity", "predictions", "schedule", "tracking"}
OTHERS = {
    "Diagnosis", "Finding", "StudyRecord", "TrainConfig", "Trainer", "TrialRecord", "Workload", "__version__",
    "callbacks", "classification", "curves_panel", "diagnose", "diagnose_function", "diagnose_program", "errors", "export_studies", "hooks", "judge",
    "language_model", "list_studies", "list_workloads", "live_view", "load_workload", "log", "open", "read_log", "regression", "run_notebooks", "schedules",
    "set_note", "studies_panel", "summarise", "watch", "write_report",
}  # fmt: skip


def test_these_are_the_public_names() -> None:
    """Written out: a name that is lost, or comes along unseen, is a change of the interface."""
    assert set(workbench.__all__) == QUESTIONS | OTHERS
    assert {name for name in QUESTIONS if hasattr(getattr(workbench, name), "Study")} == STUDIES
    assert [name for name in QUESTIONS - {"predictions"} if not hasattr(getattr(workbench, name), "diagnose")] == []


@pytest.mark.parametrize("name", workbench.__all__)
def test_every_public_name_resolves_and_others_are_refused(name: str) -> None:
    value = getattr(workbench, name)
    assert value is getattr(workbench, name)
    if isinstance(value, ModuleType):
        assert set(value.__all__) <= set(dir(value))
        assert all(callable(getattr(value, member)) for member in value.__all__)
        with pytest.raises(AttributeError, match="no_such_name"):
            value.no_such_name  # noqa: B018


def test_every_public_name_stands_in_a_page() -> None:
    """In full, `wb.data.audit`, or by its last word alone where that is no word of English: `draw_sample`, `UsageError`."""
    pages = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        pages += "".join(line for cell in json.loads(path.read_text())["cells"] for line in [*cell["source"], "\n"])
    words = set(re.findall(r"\w+", pages))
    names = [(name, f"wb.{name}") for name in workbench.__all__ if name != "__version__"]
    for owner, full in list(names):
        names += [(name, f"{full}.{name}") for name in getattr(getattr(workbench, owner), "__all__", ())]
    plain = [full for name, full in names if name not in words or re.fullmatch("[a-z]+", name)]
    assert [full for full in plain if not re.search(rf"{re.escape(full)}\b", pages)] == []
