"""The documents name what there is, and nothing that is not."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import workbench as wb
import workbench.topics
from tests.helpers.pages import PAGES as BLOCK_PAGES
from tests.helpers.pages import block, blocks
from tests.helpers.records import empty
from workbench import cli
from workbench.findings.finding import Finding
from workbench.topics.registry import CODES, TOPICS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "notebooks" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
PACKAGE = ROOT / "workbench"
CLAUSE = re.compile(r"\b(?:[FP]\d\.\d+|T\d+\.\d+)\b")
CODES_PAGE = (ROOT / "docs" / "codes.md").read_text()
CLAUSES_PAGE = (ROOT / "docs" / "playbook.md").read_text()
NEEDS_A_FOLDER = {"diagnose_tracking", "diagnose_evaluation_cases"}


def code(path: Path) -> str:
    """Fenced blocks and inline code of a page: what a reader copies."""
    text = path.read_text()
    return "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))


def commands(text: str) -> list[list[str]]:
    """Every `workbench ...` line without placeholders, as words."""
    lines = [line.split("#")[0].strip().removeprefix("$ ") for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if re.match(r"workbench [a-z]", line) and "..." not in line]


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


@pytest.mark.parametrize("path", [p for p in PAGES if p.exists()], ids=lambda p: p.name)
def test_links_inside_the_project_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), target


def strings(tree: ast.AST) -> Iterator[str]:
    """Every string of a module that is no docstring, pieces of f-strings included."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def stated(page: str) -> set[str]:
    """The clauses that a page states: one a row, but for those of T, which share the row of their section."""
    rows = re.findall(r"^\| ([FPT]\d+(?:\.\d+)?) \| (.+) \|$", page, re.MULTILINE)
    return {first for first, _ in rows} | {
        c for first, words in rows for c in CLAUSE.findall(words) if c.startswith(f"{first}.")
    }


def test_every_clause_that_a_finding_or_a_page_cites_is_stated() -> None:
    cited = {
        (path.name, clause)
        for path in PACKAGE.rglob("*.py")
        for text in strings(ast.parse(path.read_text()))
        for clause in CLAUSE.findall(text)
    }
    assert {("diagnose.py", "F1.12"), ("diagnose.py", "F4.4"), ("server_load.py", "T13.5")} <= cited
    cited |= {(path.name, clause) for path in PAGES for clause in CLAUSE.findall(path.read_text())}
    there = stated(CLAUSES_PAGE)
    assert sorted((clause, where) for where, clause in cited if clause not in there) == []


def clauses_on_the_page() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `([a-z_.]+)` \| [^|]+[?] \| ([^|]+) \|$", CODES_PAGE, re.MULTILINE)
    return {code: set(CLAUSE.findall(clause)) for code, clause in rows}


def test_every_code_is_explained_with_its_clause_and_no_other() -> None:
    clauses = clauses_on_the_page()
    assert len(clauses) == CODES_PAGE.count("\n| `") > 100
    assert set(clauses) == set(CODES)
    for code, clause in CODES.items():
        assert set(CLAUSE.findall(clause)) <= clauses[code], code
        assert CLAUSE.search(clause), code
    ordered = set(re.findall(r'"([a-z_]+\.[a-z_]+)"', (PACKAGE / "findings" / "causes.py").read_text()))
    assert ordered <= set(CODES)


def test_the_page_of_codes_lists_what_a_watched_loop_is_asked(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(256, 4)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for rows in torch.randint(0, 256, (60, 32)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), (x[rows, 0] > 0).long()).backward()
            optimizer.step()
    listed = CODES_PAGE.partition("A watched loop is asked these")[2].partition("Of `loop.")[0]
    told: list[str] = []
    for name in re.findall(r"`([a-z_.]+)`", listed):
        told.append(f"{told[-1].partition('.')[0]}{name}" if name.startswith(".") else name)
    assert sorted(told) == sorted(finding.code for finding in run.diagnose())


def test_every_public_name_has_a_heading_in_the_reference() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))
    pages = "\n".join(made["_reference"](name, names) for name, names in made["_modules"]().items())
    public = {f"wb.{name}": getattr(wb, name) for name in wb.__all__ if name != "__version__"}
    for owner, value in list(public.items()):
        if isinstance(value, ModuleType):
            public |= {f"{owner}.{name}": getattr(value, name) for name in value.__all__}
    plain = {name for name, value in public.items() if not isinstance(value, ModuleType)}
    assert {"wb.diagnose", "wb.errors.UsageError", "wb.stability.replay"} <= plain
    assert plain == set(re.findall(r'heading: "([\w.]+)"', pages))


def covered() -> Iterator[str]:
    """The blocks that a test asks for: `block(page, word)` is one of them, `blocks(page)` all of the page."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for test in ast.walk(ast.parse(path.read_text())):
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                for call in (node for node in ast.walk(test) if isinstance(node, ast.Call)):
                    given = [each.value for each in call.args if isinstance(each, ast.Constant)]
                    name = call.func.id if isinstance(call.func, ast.Name) else None
                    if name in {"block", "blocks"} and given and given[0] in BLOCK_PAGES:
                        yield from [block(*given)] if name == "block" else blocks(*given)


def test_every_python_block_is_run_by_a_test() -> None:
    """A new block fails here until a test asks for it."""
    there = [(page, text) for page in BLOCK_PAGES for text in blocks(page)]
    run = set(covered())
    assert len(there) > 40
    assert [f"{page}: {text}" for page, text in there if text not in run] == []


def emitted() -> Iterator[tuple[str, Finding]]:
    """What every diagnosis says of a study that has only just begun, with its question."""
    for path in sorted((PACKAGE / "topics").glob("*/*.py")):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("diagnose_") and function.__module__ == module.__name__ and name not in NEEDS_A_FOLDER:
                given = [
                    p
                    for p in inspect.signature(function).parameters.values()
                    if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD
                ]
                for finding in function(*(empty() for _ in given)):
                    yield path.parent.name, finding


def test_a_diagnosis_reports_the_codes_of_its_question_with_their_clauses() -> None:
    codes, findings = {topic.name: topic.codes for topic in TOPICS}, list(emitted())
    assert len({finding.code for _, finding in findings}) > 100
    for topic, finding in findings:
        assert finding.code in codes[topic], (topic, finding.code)
        assert set(CLAUSE.findall(finding.clause or "")) <= clauses_on_the_page()[finding.code], finding.code


def test_the_worked_example_of_a_new_question_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of CONTRIBUTING, written where a contributor would: a study, its verdict and its figure come out."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    files = re.findall(r"\*\*`(\w+\.py)`\*\*.*?```python\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == ["diagnose.py", "study.py", "figures.py", "topic.py"]
    folder = tmp_path / "weights"
    folder.mkdir()
    for name, source in [("__init__.py", ""), *files]:
        (folder / name).write_text(source)
    monkeypatch.setattr(workbench.topics, "__path__", [*workbench.topics.__path__, str(tmp_path)])
    weights = importlib.import_module("workbench.topics.weights.topic")
    workload, diagnose = workbench.load_workload("digits_mlp"), weights.TOPIC.studies["weights"].diagnose
    assert diagnose is weights.diagnose
    short = weights.Study(steps=10).run(workload, out=tmp_path / "short")
    assert diagnose(short)["weights.growth"].status == "not_measured", "one norm of each run is too few"
    record = weights.Study(steps=60).run(workload, out=tmp_path / "study")
    found = diagnose(record)
    assert len(record.trials) == 2
    assert found["weights.growth"].status == "ok"
    norms = record.steps.dropna(subset="param_norm").groupby("trial")["param_norm"]
    assert found["weights.growth"].value == pytest.approx((norms.last() / norms.first()).max())
    assert diagnose(record, most_ratio=1.0)["weights.growth"].status == "warn"
    assert len(weights.TOPIC.figures[0].draw(record, found).lines) == 2
