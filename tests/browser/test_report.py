"""The report in a real browser: on a phone, in the dark, on paper, and by keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

import workbench as wb
from tests.browser.open_to_all import serious
from tests.golden.canned import unpack
from tests.helpers.records import diagnosis, empty, study
from tests.helpers.simulated_input import pipeline
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.playbook import diagnosis_of
from workbench.report.write import write_report

PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A diagnosis with everything, one that long words and wide evidence try to burst, a pipeline, and an empty study."""
    folder = tmp_path_factory.mktemp("reports")
    word = "a_word_without_any_place_to_break_it/" * 12
    rows = [{f"column_{k}": 1.23456e-9 * k for k in range(20)} for _ in range(30)]
    wide = Finding(
        code="wide.evidence", status="warn", summary=word, advice=(word,), evidence={"rows": rows, "line": word}
    )
    loaded = replace(empty(), facts={"input_pipeline": pipeline()})
    made = {
        "study": (study(), diagnosis()),
        "wide": (study(), replace(diagnosis(), findings=(wide, *diagnosis().findings), command=f"python {word}")),
        "pipeline": (loaded, Diagnosis(findings=())),
        "empty": (empty(), Diagnosis(findings=())),
    }
    return {name: write_report(*given, folder / name / "report.html") for name, given in made.items()}


@pytest.fixture
def opened(browser: Browser, pages: dict[str, Path]) -> Iterator[Any]:
    """`opened(name, **context)` is a page whose console has to stay silent."""
    contexts, said = [], []

    def show(name: str, **given: Any) -> Any:
        context = browser.new_context(**given)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(pages[name].as_uri())
        return page

    yield show
    for context in contexts:
        context.close()
    assert said == []


def unfold(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")


@pytest.mark.parametrize("name", ["study", "wide", "pipeline", "empty"])
@pytest.mark.parametrize("unfolded", [False, True], ids=["folded", "unfolded"])
def test_a_phone_scrolls_down_and_never_sideways(opened: Any, name: str, unfolded: bool) -> None:
    page = opened(name, **PHONE)
    if unfolded:
        unfold(page)
    width, visible = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert (width, visible) == (360, 360)
    outside = "[...document.querySelectorAll('p, li, h1, h2, h3, dd, pre, figcaption, summary, button')]"
    outside += ".filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > 361).map(e => e.outerHTML.slice(0, 99))"
    assert page.evaluate(outside) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["study", "wide", "pipeline", "empty"])
def test_nothing_keeps_people_out(opened: Any, name: str, scheme: str) -> None:
    page = opened(name, color_scheme=scheme)
    unfold(page)
    assert serious(page) == []


SHEETS = "body { width: 182mm; height: 267mm; columns: 182mm; column-gap: 10mm; column-fill: auto; overflow: visible }"
"""Columns of the size of a page of A4 within its margins: what a printer does with pages, a browser does with them."""
FILLED = """() => {
    const shown = [...document.querySelectorAll('p, li, pre, svg, tr, h1, h2, summary, figcaption')], mm = 96 / 25.4, filled = [];
    for (const box of shown.flatMap(each => [...each.getClientRects()]).filter(box => box.height > 0)) {
        const sheet = Math.floor((box.left + scrollX + 1) / (192 * mm)); // a pixel for rounding
        filled[sheet] = Math.max(filled[sheet] ?? 0, (box.bottom + scrollY) / (267 * mm));
    }
    return filled;
}"""


@pytest.mark.parametrize("kind", ["diagnosis", "instability"])
def test_twenty_trials_are_at_most_six_pages_of_paper_and_none_is_half_empty(
    opened: Any, pages: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    record = wb.open(unpack(kind, tmp_path))
    assert len(record.trials) >= 19
    pages[kind] = write_report(record, diagnosis_of(record), tmp_path / "report.html")
    page = opened(kind)
    printed = len(re.findall(rb"/Type /Page\b", page.pdf(format="A4", prefer_css_page_size=True)))
    page.emulate_media(media="print")
    page.add_style_tag(content=SHEETS)
    sheets = page.evaluate(FILLED)
    assert len(sheets) == printed <= 6
    assert all(0.6 < filled <= 1.01 for filled in sheets[:-1]), sheets


def test_the_keyboard_unfolds_and_copies(opened: Any) -> None:
    page = opened("study")
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.get_attribute("open") is not None
    button = page.get_by_role("button", name="Copy").first
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copied").wait_for()
