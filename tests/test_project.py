"""What is declared fits together: requirements, the tested set, the conda environment, and the files of a wheel."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_the_conda_environment_installs_the_project_itself_on_a_python_that_it_takes() -> None:
    *others, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert pip == {"pip": ["-e .[dev]"]}
    (python,) = [entry for entry in others if re.match(r"python\b", entry)]
    assert python.partition("=")[2].lstrip("=") in SpecifierSet(PROJECT["requires-python"])


def test_the_tested_set_fits_every_requirement_on_every_machine() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    assert [line for line in lines if line and not re.fullmatch(r"[\w.-]+==\d[\w.]*", line)] == []
    tested = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    asked = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    for requirement in map(Requirement, asked):
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(tested[canonicalize_name(requirement.name)]), requirement


def test_every_file_that_is_no_module_is_package_data() -> None:
    package = ROOT / "workbench"
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["workbench"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    there = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert package / "views" / "vendor" / "uPlot.iife.min.js" in there
    assert there - packed == set()
