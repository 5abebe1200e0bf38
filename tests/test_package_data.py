"""What is installed is whole: every style sheet, script and setting of the package goes into a wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workbench"


def test_every_file_that_is_no_module_is_package_data() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["workbench"]
    packed = {path for pattern in declared for path in PACKAGE.glob(pattern)}
    there = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert {PACKAGE / "views" / "vendor" / name for name in ("uPlot.LICENSE", "uPlot.iife.min.js")} <= there
    assert there - packed == set()
