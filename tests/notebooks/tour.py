"""What holds the notebooks together as a tour; each rule returns what is wrong, in words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat

CLAUSE = re.compile(r"\b(?:[FP]\d+\.\d+|T\d+(?:\.\d+)?)\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SAYS = {
    "how many minutes it takes": r"\*\*Time\.\*\* [^\n]*\b\d+ minutes?\b",
    "what to look at": r"\*\*What to look at\.\*\* \S",
    "what to do next": r"\*\*What to do next\.\*\*\s+\S",
}


def tour_problems(path: Path, clauses: Path) -> list[str]:
    """Everything that is wrong with the words of one notebook.

    Args:
        path: the notebook.
        clauses: the page that states each clause.
    """
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    said = [f"the first cell does not say {what}" for what, rule in SAYS.items() if not re.search(rule, cells[0])]
    words = [re.sub(r"```.*?```", "", cell, flags=re.DOTALL) for cell in cells]
    for cell in words:
        said += broken_links(cell, path.parent)
    stated = set(CLAUSE.findall(clauses.read_text()))
    cited = {clause for cell in words for clause in CLAUSE.findall(cell)}
    said += [f"{clause} is not stated in {clauses.name}" for clause in sorted(cited - stated)]
    if not cited:
        said.append("no clause is cited")
    if f"{clauses.name}#" not in words[0]:
        said.append(f"the first cell has no link into {clauses.name}")
    return said


def chain_problems(folder: Path) -> list[str]:
    """What breaks the chain: each first cell ends in a line with the notebook before, if any, and the one after."""
    names = [path.name for path in sorted(folder.glob("*.ipynb"))]
    said = []
    for number, name in enumerate(names):
        expected = [names[k] for k in (number - 1, number + 1) if 0 <= k < len(names)]
        last = nbformat.read(folder / name, as_version=4).cells[0].source.rsplit("\n", 1)[-1]
        found = [target for target in LINK.findall(last) if target.endswith(".ipynb")]
        if found != expected:
            said.append(f"{name} leads to {found}, not to {expected}")
        said += [
            f"{name} has no link to {page}" for page in ("README.md", "glossary.md", "playbook.md") if page not in last
        ]
    return said


def broken_links(text: str, folder: Path) -> Iterator[str]:
    """Links of a text in `folder` that lead nowhere, in JupyterLab or on a page of a repository."""
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        page, _, anchor = target.partition("#")
        file = folder / page if page else None
        if file is not None and not file.exists():
            yield f"{target} does not exist"
        elif anchor and file is not None and anchor not in anchors(file.read_text()):
            yield f"{target}: there is no such heading"


def anchors(page: str) -> set[str]:
    """Headings that a link finds in both: JupyterLab keeps case and signs of a heading, a repository's page does not."""
    return {title.replace(" ", "-") for title in headings(page) if re.fullmatch(r"[a-z][a-z -]*", title)}


def headings(page: str) -> list[str]:
    """Second-level headings, in order."""
    return re.findall(r"^## (.+)$", page, re.MULTILINE)


def glossary_problems(page: Path) -> list[str]:
    """What is wrong with the glossary: order, terms said twice, definitions that are missing or long, links."""
    text = page.read_text()
    terms = headings(text)
    said = [f"{b} stands behind {a}" for a, b in itertools.pairwise(terms) if a >= b]
    said += [
        f"{term} cannot be linked: lower-case words only"
        for term in terms
        if term.replace(" ", "-") not in anchors(text)
    ]
    for term, body in re.findall(r"^## (.+)\n\n(.*)", text, re.MULTILINE):
        sentences = len(re.findall(r"[.?](?: |$)", body))
        if not 1 <= sentences <= 4:
            said.append(f"{term} has {sentences} sentences")
    for target in LINK.findall(text):
        if target.startswith("#") and target[1:] not in anchors(text):
            said.append(f"{target}: there is no such heading")
    return said + list(broken_links(text, page.parent))
