"""Imports run down only, heavy packages stay in their one place, and no modules import each other in a circle."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "workbench"

# From the ground up; the first pattern that fits a module's name (without "workbench.") is its floor.
FLOORS = (
    r"errors|metrics|config|schedules|record|record_\w+|ledger|ledger_\w+|repro|plain",
    r"diagnostics(\..+)?",
    r"workloads(\..+)?",
    r"(train|hosts)(\..+)?",
    r"parameter_server(\.(errors|context))?",
    r"parameter_server\.workers(\..+)?",
    r"parameter_server\.(data|servers)(\..+)?",
    r"parameter_server\.links(\..+)?",
    r"parameter_server\.engines(\..+)?",
    r"parameter_server\.cluster(\..+)?",
    r"parameter_server\.strategy",
    r"parameter_server\.coordinator(\..+)?",
    r"parameter_server\.(fit|trials|toy|behaviours|program)(\..+)?",
    r"studies(\..+)?",
    r"plots(\..+)?",
    r"report|report_\w+|notebook_\w+",
    r"playbook|playbook_\w+",  # its walk ends with a written report
    r"panels(\..+)?",
    r"cli|cli_\w+|__main__",
)
TRAINING = r"(workloads|train|hosts|parameter_server|studies)(\..+)?"
PANELS = r"panels(\..+)?"
PLOTS = r"plots(\..+)?"
RECORDS = r"record|record_\w+"
HOME = {
    "torch": TRAINING,
    "torchvision": TRAINING,
    "torch.distributed": r"hosts(\..+)?",
    "safetensors": TRAINING,
    "ray": r"hosts\.ray_(cluster|node|token)",
    "sklearn": r"workloads(\..+)?",
    "matplotlib": PLOTS,
    "optuna": r"ledger|ledger_storage",
    "sqlalchemy": r"ledger|ledger_storage",
    "openpyxl": r"ledger_export",
    "pyarrow": RECORDS,
    "papermill": r"notebook_(runner|engine)",
    "nbformat": r"notebook_(runner|html)",
    "nbclient": r"notebook_(runner|engine)",
    "jupyter_client": r"notebook_engine",
    "nbconvert": r"notebook_html",
    "ipywidgets": PANELS,
    "anywidget": PANELS,
    "IPython": PANELS,
}
DIAGNOSTICS_MAY_USE = {"numpy", "scipy", "pandas"}
LIGHT = r"__init__|__main__|cli|cli_\w+"  # nothing but the standard library before a command needs it


class Import(NamedTuple):
    importer: str  # without "workbench."; a package is its own name, the top package "__init__"
    target: str  # full dotted name
    line: int
    typing_only: bool
    lazy: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def modules(root: Path) -> dict[str, Path]:
    """Every module by its name without `workbench.`."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        found[".".join(parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> Iterator[Import]:
    """Every import statement of one module, whether at its top, in a function or under TYPE_CHECKING."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    yield from _walk(ast.parse(path.read_text()), name, "" if name == "__init__" else package, known, False, False)


def _walk(node: ast.AST, name: str, package: str, known: set[str], typing_only: bool, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            for target in _targets(child, package, known):
                yield Import(name, target, child.lineno, typing_only, lazy)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for part in child.body:
                yield from _walk(ast.Module([part], []), name, package, known, True, lazy)
            for part in child.orelse:
                yield from _walk(ast.Module([part], []), name, package, known, typing_only, lazy)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(child, name, package, known, typing_only, lazy or inside)


def _targets(node: ast.Import | ast.ImportFrom, package: str, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parts = package.split(".") if package else []
        parts = ["workbench", *parts[: len(parts) - (node.level - 1)]]
        base = ".".join([*parts, *([base] if base else [])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        if inner.removeprefix("workbench.") in known or base == "workbench" or not base.startswith("workbench"):
            yield inner
        else:
            yield base


def floor(name: str) -> int | None:
    return next((i for i, pattern in enumerate(FLOORS) if re.fullmatch(pattern, name)), None)


def violations(root: Path) -> list[str]:
    """Everything in the package under `root` that breaks a rule, one line each."""
    known = modules(root)
    every = [found for name, path in known.items() for found in imports(name, path, set(known))]
    said = [f"{name} is on no floor" for name in known if name != "__init__" and floor(name) is None]
    said += [line for found in every for line in (_floor_broken(found, set(known)), *_home_broken(found)) if line]
    said += [f"import cycle: {' > '.join(cycle)}" for cycle in cycles(set(known), every)]
    return said


def _floor_broken(found: Import, known: set[str]) -> str | None:
    root, _, inner = found.target.partition(".")
    if root != "workbench" or inner == "__version__":
        return None
    if found.importer == "__init__":
        return None if found.typing_only or found.lazy else f"{found}: the top package must stay lazy"
    while inner and inner not in known:
        inner = inner.rpartition(".")[0]
    if not inner:
        return None if found.importer in {"cli", "__main__"} else f"{found}: name the module, not the top package"
    here, there = floor(found.importer), floor(inner)
    if here is not None and there is not None and there > here:
        return f"{found}: upwards, from floor {here} to floor {there}"
    return None


def _home_broken(found: Import) -> Iterator[str]:
    root = found.target.partition(".")[0]
    if found.importer != "__init__" or not found.typing_only:
        for package, home in HOME.items():
            inside = found.target == package or found.target.startswith(f"{package}.")
            if inside and not re.fullmatch(home, found.importer):
                yield f"{found}: {package} belongs in {home}"
    if root in sys.stdlib_module_names or root in {"workbench", "__future__"}:
        return
    if re.fullmatch(r"diagnostics(\..+)?", found.importer) and root not in DIAGNOSTICS_MAY_USE:
        yield f"{found}: a diagnosis uses {', '.join(sorted(DIAGNOSTICS_MAY_USE))} only"
    if re.fullmatch(LIGHT, found.importer) and not (found.lazy or found.typing_only):
        yield f"{found}: import it where a command needs it"


def cycles(known: set[str], every: list[Import]) -> list[list[str]]:
    """Circles among modules, lazy imports and the parent packages that an import runs included."""
    graph: dict[str, set[str]] = {name: set() for name in known}
    for found in every:
        inner = found.target.removeprefix("workbench.")
        if found.typing_only or found.importer == "__init__" or not found.target.startswith("workbench."):
            continue
        parts = inner.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            own = found.importer == name or found.importer.startswith(f"{name}.")
            if name in known and (name == inner or not own):
                graph[found.importer].add(name)
    seen: set[str] = set()
    circles: list[list[str]] = []

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            circles.append([*trail[trail.index(name) :], name])
            return
        if name in seen:
            return
        for target in sorted(graph[name]):
            visit(target, [*trail, name])
        seen.add(name)

    for name in sorted(graph):
        visit(name, [])
    return circles


def test_imports_run_down_only() -> None:
    assert violations(PACKAGE) == []


def test_the_walk_sees_the_package() -> None:
    known = modules(PACKAGE)
    assert {"__init__", "errors", "config", "diagnostics", "train.hooks", "cli"} <= set(known)
    asked = "cli_diagnose"
    found = {str(i).partition(" imports ")[2] for i in imports(asked, known[asked], set(known))}
    assert "workbench.errors" in found
    assert "workbench.playbook.diagnose" in found or "workbench.playbook" in found


PLANTED = {
    "diagnostics/lr.py": ("from workbench.studies.sweep import run", "upwards"),
    "config.py": ("def f():\n    from workbench.train import trainer", "upwards"),
    "train/relative.py": ("from ..studies import sweep", "upwards"),
    "workloads/typed.py": ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import workbench.cli", "upwards"),
    "plots/top.py": ("from workbench import LRSweep", "not the top package"),
    "report.py": ("import matplotlib.pyplot as plt", "matplotlib belongs in"),
    "diagnostics/heavy.py": ("from torch import Tensor", "torch belongs in"),
    "diagnostics/wrong.py": ("import sympy", "only"),
    "studies/index.py": ("def f():\n    import optuna", "optuna belongs in"),
    "parameter_server/engines/own.py": ("def f():\n    from ray import actor", "ray belongs in"),
    "parameter_server/workers/own.py": ("from workbench.parameter_server.engines.threads import x", "upwards"),
    "ledger.py": ("import pyarrow.parquet as pq", "pyarrow belongs in"),
    "panels/run.py": ("import papermill as pm", "papermill belongs in"),
    "train/wide.py": ("from torch import distributed", "torch.distributed belongs in"),
    "cli.py": ("import pandas", "where a command needs it"),
    "__init__.py": ("from workbench.errors import UsageError", "stay lazy"),
    "shed.py": ("import os", "on no floor"),
}


def tree(root: Path, files: dict[str, str]) -> Path:
    there = "__init__.py studies/sweep.py train/trainer.py train/__init__.py parameter_server/engines/threads.py cli.py errors.py"
    for name in there.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str, tmp_path: Path) -> None:
    source, expected = PLANTED[name]
    assert violations(tree(tmp_path, {})) == []
    (line, *_) = violations(tree(tmp_path, {name: source}))
    assert expected in line


@pytest.mark.parametrize(
    "files",
    [
        {"train/a.py": "from workbench.train import b", "train/b.py": "def f():\n    from workbench.train.a import g"},
        {"train/a.py": "import workbench.train.b", "train/b.py": "from . import c", "train/c.py": "from .a import x"},
        {"studies/__init__.py": "from workbench.studies import a", "studies/a.py": "from workbench.studies import f"},
    ],
)
def test_a_planted_cycle_is_found(files: dict[str, str], tmp_path: Path) -> None:
    (line,) = violations(tree(tmp_path, files))
    assert "import cycle" in line


def test_what_is_allowed_stays_silent(tmp_path: Path) -> None:
    allowed = {
        "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from workbench.cli import main",
        "studies/more.py": "import torch\nfrom workbench.train.trainer import run\nfrom workbench import errors",
        "diagnostics/fine.py": "import numpy as np\nimport scipy.stats\nfrom workbench.errors import x",
        "hosts/ray_cluster.py": "def f():\n    import ray",
        "cli.py": "def f():\n    import pandas\n    from workbench.studies import sweep",
    }
    assert violations(tree(tmp_path, allowed)) == []
