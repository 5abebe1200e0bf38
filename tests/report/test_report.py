"""The report: one valid, self-contained, escaped page; its head in five lines, its figures with the numbers that they draw."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from tests.helpers.records import MemoryRecord, diagnosis, study
from workbench.config import TrainConfig
from workbench.findings.advice import ADVICE
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.plots.palette import PALETTE
from workbench.plots.style import draw_curve, drawing
from workbench.plots.svg import themed
from workbench.record.missing import not_ended
from workbench.report.summary import summary_rows
from workbench.report.templates import shown_line
from workbench.report.write import trial_rows, write_report
from workbench.topics.recommendation.diagnose import cost_of

VOID = {"meta", "link", "br", "img", "hr", "input"}
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
    monkeypatch.setattr("workbench.report.write.FIGURES", ())


def written(tmp_path: Path, record: Any = None, said: Diagnosis | None = None) -> str:
    return write_report(record or study(), said or diagnosis(), tmp_path / "report.html").read_text(encoding="utf-8")


def code_of(source: str, element: str) -> str:
    """Unescaped text of `<code id=element>`, as the copy button and a mouse would take it."""
    (found,) = re.findall(rf'<code id="{element}">(.*?)</code>', source, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", found))


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
    assert "https://" not in re.sub(r'<a href="https://[^"]*" rel="noreferrer">', "", source), (
        "but for what a click opens"
    )
    page = Page(source)
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base", "form")]
    assert all(a["src"].startswith("data:") for _, a in page.tags if "src" in a)
    assert all(tag == "a" or a["href"].startswith(("#", "data:")) for tag, a in page.tags if "href" in a)
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.split("script-src")[1]


def test_config_to_paste_builds_the_recommended_config(source: str) -> None:
    space: dict[str, Any] = {}
    exec(code_of(source, "config"), space)
    recommendation = diagnosis().recommendation
    assert recommendation is not None
    assert space["config"] == TrainConfig.from_dict(recommendation["config"])


def test_a_table_of_trials_begins_with_what_trains_and_names_the_metric() -> None:
    record = study()
    record.trials.loc[record.trials.index[-1], "state"] = "running"
    columns, rows = trial_rows(record, ("trial", "state", "best_value"))
    assert columns == ["trial", "state", "best validation/loss"]
    assert [row[0] for row in rows] == [len(rows) - 1, *range(len(rows) - 1)]
    record.trials["optimizer"] = "sgd"
    assert trial_rows(record, ("trial", "optimizer", "seed"))[0] == ["trial"], "what is the same in all is left out"
    record.trials.loc[record.trials.index[0], "seed"] = 1
    assert trial_rows(record, ("trial", "optimizer", "seed"))[0] == ["trial", "seed"]


@pytest.mark.usefixtures("no_figures")
def test_a_line_never_ends_within_an_option(tmp_path: Path) -> None:
    said = replace(diagnosis(), command="workbench diagnose --budget 2x -- python train.py --n-epochs 5")
    source = written(tmp_path, None, said)
    assert code_of(source, "command") == said.command, "as it is copied"
    assert re.findall(r'<span class="option">(.*?)</span>', source)[-3:] == ["--budget", "--", "--n-epochs"]


def test_a_long_curve_takes_the_colour_of_its_page() -> None:
    with drawing(None, "page") as ax:
        line = draw_curve(ax, range(100_000), [*range(99_999), 1e9], color=PALETTE[0])
        assert (line.get_ydata().min(), line.get_ydata().max()) == (0, 1e9)
        svg = themed(ax.figure, key="k", alt="")
    assert "<image" not in svg
    assert len(svg) < 100_000


def test_advice_says_what_was_adopted_and_what_was_tried_in_vain(tmp_path: Path) -> None:
    warmup, clipping = str(ADVICE["warmup"]), str(ADVICE["clipping"])
    said = diagnosis()
    finding = replace(said["lr.at_edge"], advice=(warmup, clipping, "Look at the data."))
    recommendation = {**(said.recommendation or {}), "changed": ["peak_lr", "warmup_steps", "total_steps"]}
    record = study()
    record.trials.loc[record.trials.index[-1], ["stage", "max_grad_norm"]] = ["clipping", 1.0]
    source = written(tmp_path, record, Diagnosis(findings=(finding,), recommendation=recommendation))
    assert "<p>The config above does this already: warmup.</p>" in source
    assert "<p>Tried in this study, and not better: clipping.</p>" in source
    assert warmup not in html.unescape(source)
    assert clipping not in html.unescape(source)
    (line,) = re.findall(r"<li>([^<]*) <span", source)
    assert line == "Look at the data."


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


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("run --storage postgresql+psycopg://me:pw1@host/db", "run --storage postgresql+psycopg://***@host/db"),
        ("workbench diagnose digits_mlp --steps 120", "workbench diagnose digits_mlp --steps 120"),
        (
            "python /home/ada/train.py --out=/home/ada/x",
            "python ~/train.py --out=/home/ada/x",
        ),  # as the shell expands it
        ("python -c 'run(\"/home/ada/x\")'", "python -c 'run(\"/home/ada/x\")'"),
        ("cd /homework/a", "cd /homework/a"),
    ],
)
@pytest.mark.usefixtures("no_figures")
def test_secrets_are_cut_out(tmp_path: Path, given: str, kept: str) -> None:
    assert shown_line(given) == kept
    assert "pw1" not in written(tmp_path, said=replace(diagnosis(), command=given, findings=()))


def test_a_folder_will_do_and_the_same_numbers_give_the_same_bytes(source: str, tmp_path: Path) -> None:
    before = plt.get_fignums()
    path = write_report(study(), diagnosis(), str(tmp_path))
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == source
    assert plt.get_fignums() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures", "report.html"]


def rows(record: MemoryRecord, said: Diagnosis) -> dict[str, str]:
    return summary_rows(record, said)


@pytest.mark.parametrize(
    ("state", "told"),
    [("stopped", "were stopped early; the same command resumes them"), ("running", "are being trained")],
)
def test_an_unfinished_study_decides_nothing(state: str, told: str) -> None:
    record = study()
    record.trials.loc[[0, 3], "state"] = state
    assert "resumes" not in not_ended(record), "of a watched loop"
    record.trials["gradients"] = "vmap"
    left = f"2 of {len(record.trials)} runs {told}"
    well = Diagnosis(findings=(Finding(code="a.b", status="ok", summary="Fine."),))
    assert rows(record, well)["Found"] == "No problem was found so far."
    assert rows(record, diagnosis())["Config"] == f"Not decided: {left}."
    assert Diagnosis.of(record, diagnosis().findings).tally.endswith(f"; {left}")
    record.trials = record.trials.iloc[:1].assign(steps_run=20, total_steps=30, seconds=1.0, stage="baseline")
    assert cost_of(record)["baseline_runs"] == (pytest.approx(2 / 3) if state == "stopped" else 1.0)
    assert (
        "the run was stopped at 20 of 30 updates; the same command resumes it" in rows(record, diagnosis())["Config"]
    ) == (state == "stopped")


@pytest.mark.parametrize(
    ("kept", "told"),
    [("adamw", "adamw"), ("_workload_mine:<lambda>#8bd91e5b", "your own lambda"), ("train:make_optimizer#1", "make_optimizer")],
)  # fmt: skip
def test_an_optimizer_has_the_name_that_its_owner_knows(kept: str, told: str) -> None:
    record = study()
    record.config["optimizer"] = kept
    assert f"the baseline is {told}, lr" in rows(record, diagnosis())["Trained"]


def test_what_a_record_says_is_redacted() -> None:
    nasty = Finding(code="a.b", status="fail", summary="<b>see</b> /home/ada/runs --token pw1")
    assert rows(study(), Diagnosis(findings=(nasty,)))["Found"] == "<b>see</b> ~/runs --token ***"


def test_a_finding_says_what_it_found_and_shows_the_line_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nloss = criterion(net(x).softmax(1), y)\n")
    named = Finding(
        code="loop.probabilities", status="fail", summary="cross_entropy gets <probabilities> (train.py:2), train.py:9."
    )
    record = study()
    monkeypatch.chdir(tmp_path)
    for created, shown in (("2100-01-01T00:00:00+00:00", True), ("2000-01-01T00:00:00+00:00", False)):
        record.study = {"created": created}  # type: ignore[attr-defined]
        page = write_report(record, Diagnosis(findings=(named,)), tmp_path / "r.html").read_text()
        card = page.partition("<h2>Findings</h2>")[2].partition("</article>")[0]
        assert "cross_entropy gets &lt;probabilities&gt; (train.py:2), train.py:9." in card
        assert ("<code>loss = criterion(net(x).softmax(1), y)</code>" in card) == shown
        assert card.count('<p class="small">') == shown
