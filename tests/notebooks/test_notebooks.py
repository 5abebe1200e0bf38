"""Every notebook keeps to the rules, and runs as a function: small parameters in, a verdict out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import papermill
import pytest

from tests.notebooks.guard import problems
from workbench.notebook.runner import describe_notebook, read_verdict, run_notebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
THERE = sorted(NOTEBOOKS.glob("*.ipynb"))
SMALL: dict[str, Any] = {"workload": "digits_mlp", "steps": 30, "seeds": 1, "depths": [2]}


@pytest.mark.parametrize("path", THERE, ids=lambda p: p.stem)
def test_it_keeps_to_the_rules(path: Path) -> None:
    assert problems(path) == []


@pytest.mark.parametrize("path", THERE, ids=lambda p: p.stem)
def test_papermill_sees_every_parameter(path: Path) -> None:
    assert list(papermill.inspect_notebook(path)) == [p.name for p in describe_notebook(path).parameters]


@pytest.mark.slow
@pytest.mark.parametrize("path", THERE, ids=lambda p: p.stem)
def test_it_is_a_function_of_its_parameters(path: Path, tmp_path: Path) -> None:
    declared = {p.name for p in describe_notebook(path).parameters}
    assert {"workload", "out"} <= declared
    values = {name: value for name, value in SMALL.items() if name in declared}
    done = run_notebook(path, {**values, "out": str(tmp_path / "study")}, output=tmp_path / "done.ipynb", timeout_s=300)
    verdicts = read_verdict(done)
    assert verdicts[-1]["workload"] == "digits_mlp"
    assert verdicts[-1]["findings"]
    assert (tmp_path / "study" / "study.json").is_file()
