"""The documents name what there is, and nothing that is not."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from workbench import cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "notebooks" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
MADE_BY_THE_READER = ("runs/", ".venv/")


def code(path: Path) -> str:
    """Fenced blocks and inline code of a page: what a reader copies."""
    text = path.read_text()
    return "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))


def commands(text: str) -> list[list[str]]:
    """Every `workbench ...` line without placeholders, as words."""
    lines = [line.split("#")[0].strip().removeprefix("$ ") for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if re.match(r"workbench [a-z]", line) and "..." not in line]


def paths(text: str) -> list[str]:
    """Every relative path in prose or code: with a slash and an ending, or with a slash at its end."""
    found = re.findall(r"(?<![\w./:<-])[\w.-]+(?:/[\w.-]+)*/(?:[\w.-]*\w\.[a-z]{2,5}\b)?(?![\w/*-])", text)
    return [path for path in found if not path.startswith(MADE_BY_THE_READER)]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_page_is_there(path: Path) -> None:
    assert len(path.read_text().split()) > 20


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_every_command_is_in_the_readme(command: str) -> None:
    assert re.search(rf"\bworkbench {command}\b", code(README))


@pytest.mark.parametrize("path", [p for p in PAGES if p.exists()], ids=lambda p: p.name)
def test_commands_in_the_pages_are_accepted(path: Path) -> None:
    parser = cli.build_parser()
    for words in commands(code(path)):
        if words[0] in cli._COMMANDS and (len(words) > 1 or words[0] in {"list", "studies", "lab"}):
            assert parser.parse_args(words).command is not None
        else:
            assert words[0] in cli._COMMANDS, f"workbench {words[0]}"


@pytest.mark.parametrize("path", [p for p in PAGES if p.exists()], ids=lambda p: p.name)
def test_make_targets_in_the_pages_exist(path: Path) -> None:
    named = set(re.findall(r"\bmake ([a-z]+)", code(path)))
    assert named <= TARGETS
    if path == README:
        assert {"diagnose", "test", "lab"} <= named


def test_every_make_target_says_what_it_is_for() -> None:
    explained = set(re.findall(r"^# make ([a-z]+)  +\S", MAKEFILE, re.MULTILINE))
    assert explained == TARGETS - {"help"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_notebook_is_listed(path: Path) -> None:
    assert path.name in (ROOT / "notebooks" / "README.md").read_text()


@pytest.mark.parametrize("path", [p for p in PAGES if p.exists()], ids=lambda p: p.name)
def test_links_inside_the_project_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_paths_in_the_pages_exist(path: Path) -> None:
    homes = (ROOT, ROOT / "workbench", path.parent)
    assert [named for named in paths(path.read_text()) if not any((home / named).exists() for home in homes)] == []


def test_paths_are_found_in_prose_and_code() -> None:
    text = "see tests/benchmarks/README.md. In `docs/`, `plots/lr_sweep.py` and/or runs/x/report.html; https://a.b/c.md"
    assert paths(text) == ["tests/benchmarks/README.md", "docs/", "plots/lr_sweep.py"]


def test_every_decision_names_its_source() -> None:
    decisions = re.split(r"\n\n(?=\*\*)", (ROOT / "docs" / "decisions.md").read_text())[1:]
    assert len(decisions) >= 8
    for decision in decisions:
        assert re.search(r"\n\*Source:\* .*([FP]\d\.\d|arXiv|rules? of thumb)", decision, re.DOTALL), decision[:60]


def test_commands_are_found_in_a_page() -> None:
    text = "$ workbench list\nworkbench run x -p a=1  # now\nworkbench diagnose ...\nimport workbench as wb"
    assert commands(text) == [["list"], ["run", "x", "-p", "a=1"]]
