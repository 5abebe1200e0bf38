"""The report: one valid, self-contained, escaped page with everything that the diagnosis says."""

from __future__ import annotations

import html
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from tests.helpers.records import MemoryRecord, diagnosis, empty, study
from tests.helpers.simulated_input import pipeline
from workbench.config import TrainConfig
from workbench.errors import RecordError
from workbench.findings.advice import ADVICE
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.report.html import redact, value_text
from workbench.report.page import write_report
from workbench.topics.optimizers.diagnose import diagnose_optimizers
from workbench.topics.optimizers.study import OptimizersStudy
from workbench.topics.registry import FIGURES, STUDIES
from workbench.workloads.registry import load_workload

VOID = {"meta", "link", "br", "img", "hr", "input"}
ALWAYS = [figure for figure in FIGURES if not figure.own]
NASTY = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>$body"


class Page(HTMLParser):
    """Checks that tags nest, and keeps attributes and text."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(data for tag, data in self.texts if tag not in ("script", "style"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the whole study, drawn once."""
    return written(tmp_path_factory.mktemp("report"))


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out where a test is about something else: they take a second."""
    monkeypatch.setattr("workbench.report.figures.FIGURES", ())


def written(tmp_path: Path, record: Any = None, said: Diagnosis | None = None) -> str:
    return write_report(record or study(), said or diagnosis(), tmp_path / "report.html").read_text(encoding="utf-8")


def code_of(source: str, element: str) -> str:
    """Unescaped text of `<code id=element>`, as the copy button and a mouse would take it."""
    (found,) = re.findall(rf'<code id="{element}">(.*?)</code>', source, flags=re.DOTALL)
    return Page(f"<code>{found}</code>").text


def test_is_well_formed_with_unique_ids(source: str) -> None:
    page = Page(source)
    assert source.startswith("<!doctype html>")
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', source))
    assert references <= set(ids)
    assert len(references) > 10


def test_loads_nothing_from_anywhere(source: str) -> None:
    assert "http://" not in source
    assert "https://" not in source
    page = Page(source)
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base", "form")]
    assert all(a["src"].startswith("data:") for _, a in page.tags if "src" in a)
    assert all(a["href"].startswith(("#", "data:")) for _, a in page.tags if "href" in a)
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.split("script-src")[1]


def test_shows_every_finding_worst_first_with_symbol_and_word(source: str) -> None:
    said = diagnosis()
    cards = re.findall(r'<article class="card (\w+)">\s*<header>(.*?)</header>', source, flags=re.DOTALL)
    assert len(cards) == len(said.findings)
    codes = [re.findall(r"<code>(.*?)</code>", header)[0] for _, header in cards]
    follows = [("stability.mid", "stability.early_recovers")]
    assert [pair for pair in itertools.pairwise(codes) if pair in follows] == follows
    statuses = [status for (status, _), code in zip(cards, codes, strict=True) if code not in dict(follows).values()]
    assert statuses == sorted(statuses, key=["fail", "warn", "not_measured", "ok"].index)
    for status, header in cards:
        words = {
            "fail": ("✕", "Fail"),
            "warn": ("!", "Warning"),
            "not_measured": ("?", "Not measured"),
            "ok": ("✓", "OK"),
        }
        assert all(word in header for word in words[status])
    for finding in said.findings:
        assert f"<code>{finding.code}</code>" in source
        assert finding.summary in Page(source).text
        assert f"clause {finding.clause}" in source


def test_verdict_comes_before_everything_else(source: str) -> None:
    assert source.index('class="verdict fail"') < source.index("<article") < source.index("<figure")
    assert "<title>digits_mlp: fail</title>" in source


def test_cost_command_and_every_trial(source: str) -> None:
    assert "1,150 training steps · 3.2 s · 9.5 baseline runs" in source
    assert code_of(source, "command") == "workbench diagnose digits_mlp --steps 120"
    table = source[source.index("All 11 trials") :]
    assert table.count("<tr>") == 1 + len(study().trials)


def test_config_to_paste_builds_the_recommended_config(source: str) -> None:
    space: dict[str, Any] = {}
    exec(code_of(source, "config"), space)
    recommendation = diagnosis().recommendation
    assert recommendation is not None
    assert space["config"] == TrainConfig.from_dict(recommendation["config"])


def test_comparison_has_changed_fields_and_results(source: str) -> None:
    for row in (("peak_lr", "0.02", "0.08"), ("max_grad_norm", "–", "0.5"), ("validation/loss", "0.2114", "0.1007")):
        assert re.search(r"<td[^>]*>" + r"</td><td[^>]*>".join(map(re.escape, row)) + "</td>", source)


def test_advice_is_listed_once_worst_finding_first(source: str) -> None:
    listed = re.findall(r"<ol>(.*?)</ol>", source, flags=re.DOTALL)[0]
    assert re.findall(r"<li>(.*?) <span", listed) == ["Try a warmup.", "Try clipping."]
    assert "(stability.mid)" in listed


def test_advice_says_what_was_adopted_and_what_was_tried_in_vain(tmp_path: Path) -> None:
    warmup, clipping = str(ADVICE["warmup"]), str(ADVICE["clipping"])
    said = diagnosis()
    finding = replace(said["lr.at_edge"], advice=(warmup, clipping, "Look at the data."))
    recommendation = {**(said.recommendation or {}), "changed": ["peak_lr", "warmup_steps", "total_steps"]}
    record = study()
    record.trials.loc[record.trials.index[-1], ["stage", "max_grad_norm"]] = ["clipping", 1.0]
    source = written(tmp_path, record, Diagnosis(findings=(finding,), recommendation=recommendation))
    assert "<p>The recommended config does this already: warmup.</p>" in source
    assert "<p>Tried in this study, and not better: clipping.</p>" in source
    assert warmup not in html.unescape(source)
    assert clipping not in html.unescape(source)
    (line,) = re.findall(r"<li>(.*?) <span", source, flags=re.DOTALL)
    assert line == "Look at the data."


def test_a_card_of_the_report_leaves_its_advice_to_the_list(source: str) -> None:
    assert source.count("Try clipping.") == 1


def test_every_figure_has_alt_text_and_a_caption(source: str) -> None:
    page = Page(source)
    pictures = page.all("svg")
    assert len(pictures) == len(page.all("figure")) == len(page.all("figcaption")) == len(ALWAYS)
    assert all(a["role"] == "img" and len(a["aria-label"]) > 30 for a in pictures)
    assert "The best lr is 0.08." in pictures[0]["aria-label"]


def test_figures_without_data_are_named_with_the_reason(tmp_path: Path) -> None:
    page = Page(written(tmp_path, empty(), Diagnosis(findings=())))
    assert f"{len(ALWAYS) - 1} figures not measured" in page.text
    assert "The record has no probe run." in page.text
    assert len(page.all("svg")) == 1


@pytest.mark.usefixtures("no_figures")
def test_empty_diagnosis_is_no_clean_bill(tmp_path: Path) -> None:
    text = Page(written(tmp_path, empty(), Diagnosis(findings=()))).text
    assert "Not measured" in text
    assert "Nothing was looked at." in text


def test_text_from_outside_is_escaped_everywhere(tmp_path: Path) -> None:
    nasty = Finding(
        code=NASTY, status="warn", summary=NASTY, unit=NASTY, value=1.0, clause=NASTY, advice=(NASTY,),
        evidence={NASTY: NASTY, "rows": [{NASTY: NASTY}], "list": [NASTY]},
    )  # fmt: skip
    fine = replace(nasty, code="lr.best", status="ok")
    recommendation = {
        "config": {"peak_lr": NASTY},
        "changed": [NASTY],
        "baseline": {NASTY: NASTY},
        "recommended": {},
        "adopted": True,
    }
    record = study()
    record.trials["stage"] = record.trials["state"] = NASTY
    said = Diagnosis(findings=(nasty, fine), workload=NASTY, command=NASTY, recommendation=recommendation)
    source = written(tmp_path, record, said)
    page = Page(source)
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    assert code_of(source, "command") == NASTY


@pytest.mark.usefixtures("no_figures")
def test_a_config_with_functions_of_its_own_starts_from_the_workloads(tmp_path: Path) -> None:
    own = TrainConfig(peak_lr=1, total_steps=5, batch_size=2, schedule=lambda progress: 1 - progress)
    chosen = dict(diagnosis().recommendation or {}) | {"config": own.to_dict(), "paste": own.paste(peak_lr=2.0)}
    pasted = code_of(written(tmp_path, said=replace(diagnosis(), recommendation=chosen)), "config")
    space: dict[str, Any] = {"workload": SimpleNamespace(config=own)}
    exec(pasted, space)
    assert space["config"] == own.replace(peak_lr=2.0)
    assert pasted.startswith("# ")


def test_a_schedule_of_ones_own_is_not_drawn_and_an_optimizer_of_ones_own_does_not_matter(tmp_path: Path) -> None:
    record = study()
    record.config = record.config | {"optimizer": "mine:make#1"}
    said = replace(diagnosis(), recommendation=None)
    assert 'id="figure-schedule"' in written(tmp_path, record, said)
    record.config = record.config | {"schedule": "mine:fall#2"}
    source = written(tmp_path, record, said)
    assert 'id="figure-schedule"' not in source
    assert "The schedule is a function of your own, mine:fall#2, and the record keeps its name only." in source
    assert not (tmp_path / "figures" / "schedule.svg").exists()


@pytest.mark.usefixtures("no_figures")
def test_not_adopted_is_said_with_its_reason(tmp_path: Path) -> None:
    more = {"adopted": False, "changed": [], "config": study().config, "reason": "Worse by 0.1 & no <less>."}
    chosen = dict(diagnosis().recommendation or {}) | more
    source = written(tmp_path, said=replace(diagnosis(), recommendation=chosen))
    assert "No change was proven better" in source
    assert "Worse by 0.1 &amp; no &lt;less&gt;." in source
    assert ">candidate, not adopted<" in source
    assert ">recommended<" not in source


def test_measurements_have_a_table_that_other_findings_stay_out_of(source: str) -> None:
    measured = source[source.index("<h2>Measured</h2>") : source.index('<article class="card ok">')]
    assert re.findall(r"<tr><td[^>]*>([^<]+)</td>", measured) == [
        "lr.best",
        "lr.unstable",
        "warmup.shortest",
        "clipping.threshold",
    ]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("run --storage postgresql+psycopg://me:pw1@host/db", "run --storage postgresql+psycopg://***@host/db"),
        ("run --token pw1 --steps 5", "run --token *** --steps 5"),
        ("API_KEY=pw1 workbench diagnose x", "API_KEY=*** workbench diagnose x"),
        ("run --hub-token='pw1 pw1'", "run --hub-token=***"),
        ("workbench diagnose digits_mlp --steps 120", "workbench diagnose digits_mlp --steps 120"),
    ],
)
@pytest.mark.usefixtures("no_figures")
def test_secrets_are_cut_out(tmp_path: Path, given: str, kept: str) -> None:
    assert redact(given) == kept
    assert "pw1" not in written(tmp_path, said=replace(diagnosis(), command=given, findings=()))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.3592e32, "1.359e32"), (1e-5, "1e-5"), (0.05, "0.05"), (4000.0, "4,000"), (None, "–"), (float("inf"), "inf")],
)
def test_numbers_are_shown_with_four_digits(value: float | None, shown: str) -> None:
    assert value_text(value) == shown


def test_copy_buttons_wait_for_javascript(source: str) -> None:
    buttons = Page(source).all("button")
    assert {a["data-copy"] for a in buttons} == {"config", "command"}
    assert all("hidden" in a for a in buttons)


def test_a_folder_will_do_and_the_same_numbers_give_the_same_bytes(source: str, tmp_path: Path) -> None:
    before = plt.get_fignums()
    path = write_report(study(), diagnosis(), str(tmp_path))
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == source
    assert plt.get_fignums() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures", "report.html"]


def test_every_figure_is_a_file_of_its_own_too(tmp_path: Path) -> None:
    source = written(tmp_path)
    files = list((tmp_path / "figures").iterdir())
    assert sorted(p.stem for p in files) == sorted(figure.name for figure in ALWAYS)
    for path in files:
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.attrib["width"].endswith("pt")
        drawn = path.read_text(encoding="utf-8")
        assert "var(" not in drawn
        assert "currentColor" not in drawn
        paths = re.findall(r' d="[^"]+"', drawn)
        assert len(paths) > 5
        assert all(d in source for d in paths)


def test_figures_of_a_study_of_its_own_are_shown_where_the_record_holds_its_facts(tmp_path: Path) -> None:
    record = replace(empty(), facts={"input_pipeline": pipeline(), "hosts": {}})
    page = Page(written(tmp_path, record, Diagnosis(findings=())))
    shown = [attrs["id"] for attrs in page.all("figure")]
    assert shown == ["figure-schedule", "figure-input-pipeline", "figure-input-workers"], "these hosts have no steps"
    assert f"{len(ALWAYS) - 1} figures not measured" in page.text
    written(tmp_path, empty(), Diagnosis(findings=()))
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["schedule.svg"]


def test_a_study_of_one_question_begins_with_its_own_figure_that_no_other_study_shows(tmp_path: Path) -> None:
    workload = load_workload("quadratic")
    record = OptimizersStudy(optimizers=["sgd", "adam"], seeds=1, steps=20).run(workload, out=tmp_path / "study")
    said = diagnose_optimizers(record)
    shown = [attrs["id"] for attrs in Page(written(tmp_path, record, said)).all("figure")]
    assert shown[0] == "figure-optimizers"
    assert "figure-checkpoints" not in shown
    record.study["kind"] = "diagnosis"
    assert "figure-optimizers" not in [attrs["id"] for attrs in Page(written(tmp_path, record, said)).all("figure")]


def test_every_figure_of_a_kind_belongs_to_a_study_that_there_is() -> None:
    assert {figure.kind for figure in FIGURES} - {None} <= set(STUDIES)
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)


def test_a_figure_that_has_nothing_to_show_any_more_is_removed(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path, empty(), Diagnosis(findings=()))
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["schedule.svg"]


@pytest.mark.usefixtures("no_figures")
def test_unwritable_path_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RecordError, match=r"cannot write .*report\.html"):
        write_report(study(), diagnosis(), tmp_path)


def test_size_stays_reasonable_for_long_runs(tmp_path: Path) -> None:
    record: MemoryRecord = study()
    rng = np.random.default_rng(0)
    number = range(3)
    long = [pd.DataFrame({"trial": t, "step": range(20_000), "loss": np.exp(rng.normal(size=20_000))}) for t in number]
    record.steps = pd.concat(long).assign(loss_se=0.1, lr=0.1, grad_norm=lambda d: d["loss"])
    said = replace(diagnosis(), findings=())
    assert len(written(tmp_path, record, said)) < 1_500_000


def luminance(color: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.1)."""
    parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_words_stand_out_from_what_they_stand_on(source: str, theme: int) -> None:
    light, dark = re.findall(r":root \{(.*?)\}", source, flags=re.DOTALL)[:2]
    colors = dict(re.findall(r"--([\w-]+): (#\w{6})", light))
    if theme:
        colors |= dict(re.findall(r"--([\w-]+): (#\w{6})", dark))
    for word in ("ink", "soft", "link", "fail", "warn", "not-measured", "ok"):
        for ground in ("page", "paper") + (("code",) if word == "ink" else ()):
            low, high = sorted((luminance(colors[word]), luminance(colors[ground])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, f"{word} on {ground}"


@pytest.mark.usefixtures("no_figures")
def test_the_head_says_which_study_of_which_day_and_its_note(tmp_path: Path) -> None:
    record = study()
    record.study = {"name": "wide", "created": "2026-11-22T10:00:00+00:00", "note": "Twice as wide."}  # type: ignore[attr-defined]
    assert "Training diagnosis. Study wide, 2026-11-22. Note: Twice as wide." in Page(written(tmp_path, record)).text


@pytest.mark.usefixtures("no_figures")
def test_what_was_not_measured_is_folded_under_its_names(source: str) -> None:
    found = re.findall(r"<details><summary>(1 not measured[^<]*)</summary>\s*<article", source)
    assert found == ["1 not measured, with the reason: lr.probabilistic"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            "python /home/ada/train.py --out=/home/ada/x",
            "python ~/train.py --out=/home/ada/x",
        ),  # as the shell expands it
        ("/Users/ada/bin/python x.py", "~/bin/python x.py"),
        ("python -c 'run(\"/home/ada/x\")'", "python -c 'run(\"/home/ada/x\")'"),
        ("cd /homework/a", "cd /homework/a"),
    ],
)
def test_a_home_folder_is_the_shells_tilde(given: str, kept: str) -> None:
    assert redact(given) == kept
