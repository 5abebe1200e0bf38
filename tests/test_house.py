"""The shape of the package: what may import what, and which file may do what."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from workbench.topics.registry import TOPICS

ROOT = Path(__file__).parents[1]
TRAINING = r"(workloads|instruments|programs|train|ray|parameter_server|studies)\..+|topics\.\w+\..+"
DRAWS = r"plots(\..+)?|topics\.\w+\.(figures|panel)"
HOME = {
    "torch": TRAINING + "|lr_schedulers",
    "safetensors": TRAINING,
    "ray": r"ray\.(address|cluster|node)",
    "sklearn": r"workloads\..+",
    "matplotlib": DRAWS,
    "optuna": r"ledger\.push",
    "openpyxl": r"ledger\.studies",
    "pyarrow": r"record\..+",
    "papermill": r"notebook\.(runner|engine)",
    "nbformat": r"notebook\.(runner|html)",
    "nbclient": r"notebook\.(runner|engine)",
    "jupyter_client": r"notebook\.engine",
    "nbconvert": r"notebook\.html",
    "ipywidgets": r"(panels|views)\..+|topics\.\w+\.panel",
    "jinja2": r"report\.templates",
    "anywidget": r"(panels|views)\..+",
    "IPython": r"(panels|views)\..+",
}
"""Package -> the modules that may import it, without "workbench."."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("workbench", include_external_packages=True, cache_dir=None)


def test_imports_run_down_only_and_in_no_circle() -> None:
    """The contracts are in pyproject.toml; a process of its own, because it silences the loggers of this one."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", HOME)
def test_a_package_is_imported_where_it_belongs(graph: grimp.ImportGraph, package: str) -> None:
    importers = graph.find_modules_that_directly_import(package)
    assert importers, f"nothing imports {package} any more"
    assert [name for name in sorted(importers) if not re.fullmatch(HOME[package], name.partition(".")[2])] == []


def test_nobody_imports_the_top_package(graph: grimp.ImportGraph) -> None:
    """It stands above everything, though its names load late."""
    for importer in graph.find_modules_that_directly_import("workbench") - {"workbench.cli"}:
        for found in graph.get_import_details(importer=importer, imported="workbench"):
            assert found["line_contents"] == "from workbench import __version__", importer


def test_a_question_has_a_verdict_and_a_figure() -> None:
    names = {folder.name: {path.name for path in folder.glob("*.py")} for folder in _topics()}
    assert [name for name, files in names.items() if "diagnose.py" not in files and name != "predictions"] == []
    assert {name for name, files in names.items() if "figures.py" not in files} == {"data", "one_batch", "tracking"}


def test_the_registry_has_every_question() -> None:
    assert sorted(topic.name for topic in TOPICS) == [folder.name for folder in _topics()]


LONGEST, MOST_FILES = 400, 15
"""Lines of a file, and files of a folder."""


def test_files_and_folders_stay_small_enough_to_read() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "workbench").rglob("*.py")}
    folders = Counter(path.parent for path in lengths)
    print(
        f"{sum(lengths.values()):,} lines in {len(lengths)} files; longest {max(lengths.values())}, fullest folder {max(folders.values())}"
    )
    assert [str(path) for path, lines in lengths.items() if lines > LONGEST] == []
    assert [str(path) for path, files in folders.items() if files > MOST_FILES] == []


def _topics() -> Iterator[Path]:
    return (path for path in sorted((ROOT / "workbench" / "topics").iterdir()) if (path / "__init__.py").exists())
