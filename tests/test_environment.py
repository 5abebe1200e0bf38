"""pyproject.toml, environment.yml and constraints.txt say the same, and bring what a person needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
NEEDED = ("jupyterlab", "ipywidgets", "matplotlib", "pandas", "torch", "papermill", "nbval", "pytest")


def constraints() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.partition("==") for line in lines if line]
    return {canonicalize_name(name): version for name, _, version in pairs}


def reachable(project: dict, extras: set[str]) -> dict[str, Requirement]:
    """Packages that `pip install -e .[extras]` asks for, following extras that name this project again."""
    found = {canonicalize_name(r.name): r for r in map(Requirement, project["dependencies"])}
    todo, seen = list(extras), set()
    while todo:
        extra = todo.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if canonicalize_name(requirement.name) == canonicalize_name(project["name"]):
                todo += requirement.extras
            else:
                found[canonicalize_name(requirement.name)] = requirement
    return found


def pip_lines() -> list[str]:
    (block,) = [entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict)]
    return block


def conda_python(environment: dict) -> str:
    (entry,) = [e for e in environment["dependencies"] if isinstance(e, str) and re.match(r"python\b", e)]
    return entry.partition("=")[2].lstrip("=")


def test_conda_python_is_one_that_the_project_takes() -> None:
    version = conda_python(ENVIRONMENT)
    assert re.fullmatch(r"\d+\.\d+", version), "name one minor version"
    assert version in SpecifierSet(PROJECT["requires-python"])
    assert "3.10" not in SpecifierSet(PROJECT["requires-python"])


def test_pip_line_is_the_project_itself() -> None:
    assert pip_lines() == ["-e .[dev]"]


def test_tested_set_fits_every_requirement() -> None:
    tested = constraints()
    everything = reachable(PROJECT, set(PROJECT["optional-dependencies"]))
    missing = [name for name in everything if name not in tested]
    assert missing == []
    for name, requirement in everything.items():
        assert requirement.specifier.contains(tested[name]), f"{requirement} against {tested[name]}"


def test_tested_set_is_the_same_on_every_machine() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    odd = [line for line in lines if not re.fullmatch(r"[\w.-]+==\d[\w.]*", line)]
    assert odd == [], "no paths, addresses or local versions"
    assert constraints()["torch"] == "2.13.0"
