"""`write_report`: a diagnosis and its record as one HTML file that needs nothing else, not even a network.

The page asks for nothing from outside (its content policy forbids it) and works without JavaScript; every text that
comes from a record, a workload or a command line is escaped. What stands where is in report.html.j2.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from workbench.errors import UsageError, WorkbenchError
from workbench.findings.advice import ADVICE
from workbench.findings.causes import listed
from workbench.findings.diagnosis import SIGNS, Diagnosis, names_of, well
from workbench.findings.finding import MEASUREMENTS
from workbench.findings.topic import Figure
from workbench.plots.render import inline_svg, standalone_svg
from workbench.record.folder import write_atomic
from workbench.record.json_values import to_json
from workbench.record.roles import STAGES
from workbench.report.summary import summary_rows
from workbench.report.templates import STATUS, page_css, render, shown_line
from workbench.topics.recommendation.diagnose import next_steps
from workbench.topics.registry import FIGURES


def write_report(record: Any, diagnosis: Diagnosis, path: str | Path) -> Path:
    """Write the report, and its figures as SVG files into `figures/` beside it; return the report's path.

    Args:
        path: the HTML file, or a folder, in which it becomes `report.html`.

    Raises:
        RecordError: a file cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        target /= "report.html"
    figures = draw_figures(record, diagnosis)
    script = resources.files("workbench.report").joinpath("report.js").read_text("utf-8")
    page = render(
        "report.html.j2",
        css=page_css("report.css"),
        script=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        workload=diagnosis.workload or record.workload,
        **_head(record, diagnosis),
        **_findings(diagnosis),
        lines_of=partial(code_lines, record),
        chosen=None if diagnosis.undecided else _recommendation(record, diagnosis.recommendation),
        **_advice(record, diagnosis),
        figures=figures,
        missing=[item for item in figures if item.svg is None],
        **_study(record, diagnosis),
    )
    write_atomic(target, page.encode("utf-8"))
    write_figures(figures, target.parent / "figures")
    return target


def _head(record: Any, diagnosis: Diagnosis) -> dict[str, Any]:
    """What this page is, of which study, from which day; the verdict; the answers; what it cost."""
    study, cost = getattr(record, "study", {}), diagnosis.cost
    name = f" Study {study['name']}" if study.get("name") else ""
    day = f", {str(study['created'])[:10]}" if study.get("created") else ""
    note = f" Note: {str(study['note']).rstrip('.').replace('`', '')}." if study.get("note") else ""
    meaning = {
        "fail": "Something keeps this training from working as it could.",
        "warn": "It trains, but something deserves a look.",
        "not_measured": "No problem was found, but part of it could not be measured.",
        "ok": "No problem was found.",
    }[diagnosis.verdict]
    status, word = diagnosis.badge
    answered = {answer.question: answer.status for answer in diagnosis.answers}
    summary = summary_rows(record, diagnosis)
    known = [
        f"{cost['steps']:,} training steps" if cost.get("steps") is not None else "",
        f"{cost['seconds']:,.1f} s" if cost.get("seconds") is not None else "",
        f"updates of {cost['baseline_runs']:.1f} baseline runs" if cost.get("baseline_runs") is not None else "",
        str(cost.get("processes", "")),
        diagnosis.budget,
    ]
    return {
        "origin": f"Training diagnosis.{name}{day}{'.' if name or day else ''}{note}",
        "verdict": status,
        "word": STATUS[status][1] + word.removeprefix(SIGNS[status][1]),
        "meaning": ""
        if answered
        else meaning
        if diagnosis.findings
        else "This is not a clean bill of health: there is no finding.",
        "tally": (
            replace(diagnosis, left="") if diagnosis.recommendation else diagnosis
        ).tally,  # Config or Next tells what is left
        "answered": answered,
        "summary": summary,
        "cost": " · ".join(part for part in known if part),
    }


def _findings(diagnosis: Diagnosis) -> dict[str, Any]:
    """The alarms with what follows from each, causes first; measurements that no answer tells; what was not measured; what else is ok."""
    ranked = listed(diagnosis.findings)
    told = diagnosis.told()[0]
    measured = [f for f in told if f.status == "ok" and f.code in MEASUREMENTS]
    unknown = [f for f, _ in ranked if f.status == "not_measured"]
    fine = [f for f, _ in ranked if f.status == "ok" and f not in measured]
    return {
        "alarms": [(f, then) for f, then in ranked if f.status in ("fail", "warn")],
        "unknown": unknown,
        "unknown_names": ", ".join(names_of(unknown)),
        "measured": measured,
        "fine": fine,
        "fine_words": well(fine, more=False),
    }


_PLACE = re.compile(r"([\w./-]+\.py):(\d+)")


def code_lines(record: Any, said: str) -> list[tuple[str, str]]:
    """Return each place that a sentence names as "train.py:31", and the line of code there, where the file is older than the study."""
    study = getattr(record, "study", {})
    folder, found = Path((study.get("settings") or {}).get("folder") or "."), dict[str, str]()
    for name, number in _PLACE.findall(said):
        with suppress(OSError, ValueError, KeyError, IndexError):  # not there, no text, another day
            path = folder / name
            if path.stat().st_mtime <= datetime.fromisoformat(study["created"]).timestamp():
                found[f"{name}:{number}"] = path.read_text("utf-8").splitlines()[int(number) - 1].strip()
    return [*found.items()]


_DONE = {
    str(ADVICE[name]): said
    for name, said in (("warmup", "warmup"), ("clipping", "clipping"), ("lower_lr", "a lower learning rate"))
}


def _advice(record: Any, diagnosis: Diagnosis) -> dict[str, Any]:
    """What to try next: the advice of what stands for itself, causes first; what is done, and what was tried in vain."""
    steps = next_steps(record, diagnosis)
    done = [step for step in steps if step.done]
    tried = [step for step in steps if step.tried and not step.done]
    to_try = [step for step in steps if not step.done and not step.tried]
    if {shown_line(step.line) for step in to_try} <= {*summary_rows(record, diagnosis).get("Next", "").splitlines()}:
        to_try = []  # the head tells all of it
    return {
        name: "; ".join(_DONE.get(step.line, step.line.rstrip(".")) for step in those)
        for name, those in (("done", done), ("tried", tried))
    } | {"to_try": to_try}


_SHOWN = {"noise": "noise between evaluations", "best_step": "step of the selected checkpoint"}


def _recommendation(record: Any, found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The config to paste, and how it did against the baseline: rows of changed fields, then of results."""
    if not found:
        return None
    changed = [str(name) for name in found.get("changed", ())]
    paste = str(found.get("paste") or "")
    of_program = getattr(record, "study", {}).get("kind") == "program"
    nothing = of_program and paste and not found.get("lines")
    if nothing:
        said = " ".join(f"{line[:1].upper()}{line[1:]}." for line in paste.splitlines())
    elif of_program:
        said = ""
    elif not found.get("adopted"):
        said = "It is the baseline's own: no change was proven better."
    elif changed:
        said = f"It changes {', '.join(changed)}."
    else:
        said = "It is the baseline's own: nothing asks for a change."
    if of_program and paste:
        source = "" if nothing else paste
    elif paste.startswith(("wb.TrainConfig(", "TrainConfig(")):
        source = f"import workbench as wb\n\nconfig = wb.{paste.removeprefix('wb.')}"
    elif paste:
        source = f"# workload is the one of this report: its config holds functions of its own, which stay.\nconfig = {paste}"
    else:
        source = "# This diagnosis was kept without a config to paste; run the diagnosis again."
    config, before, after = found.get("config") or {}, found.get("baseline") or {}, found.get("recommended") or {}
    title = "Lines to change" if of_program else "Recommended config" if changed else "Config to train with"
    word = "recommended" if found.get("proof") else "worth trying"
    if changed and not found.get("proof"):
        title = f"{'Lines' if of_program else 'Config'} {word}"
    fields = [[name, to_json(record.config.get(name)), to_json(config.get(name))] for name in changed]
    results = [
        [_SHOWN.get(name, name), to_json(before.get(name)), to_json(after.get(name))]
        for name in dict.fromkeys([*before, *after])
        if name != "noise_known"
    ]
    return {
        "said": said,
        "reason": (found.get("reason") or "") if found.get("candidate") else "",
        "title": title,
        "source": source,
        "columns": ("", "baseline", word if found.get("adopted") else "candidate, not adopted"),
        "rows": fields + results if found.get("candidate") else [],
    }


_COLUMNS = ("trial", "stage", "state", "peak_lr", "best_value", "best_step", "warmup_steps", "max_grad_norm", "optimizer", "seed", "steps_run", "seconds")  # fmt: skip


_FIELDS = ("warmup_steps", "max_grad_norm", "optimizer", "seed")
"""Columns that are left out where all trials have the same: what differs is seen then, on a phone too."""


def _study(record: Any, diagnosis: Diagnosis) -> dict[str, Any]:
    """The exact command and what it ran on, and the study table."""
    study = getattr(record, "study", {})
    columns, rows = trial_rows(record, _COLUMNS)
    return {
        "command": diagnosis.command or record.command or "(started from Python; the command was not recorded)",
        "facts": [f"{name} {version}" for name, version in study.get("versions", {}).items()]
        + ([f"commit {study['commit']}"] if study.get("commit") else []),
        "columns": columns,
        "trials": rows,
    }


def trial_rows(record: Any, names: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
    """Return those of these columns of a record's table of trials that are there, and its rows, what trains now first, in words."""
    trials = record.trials
    told = [name for name in names if name in trials]
    columns = [
        name for name in told if name not in _FIELDS or len(trials) < 2 or trials[name].nunique(dropna=False) > 1
    ]
    if {"state", "steps_run"} <= {*columns} and "trial" in record.steps:
        done = trials["trial"].map(record.steps.groupby("trial")["step"].max() + 1).fillna(0).astype(int)
        trials = trials.assign(steps_run=trials["steps_run"].where(trials["state"] != "running", done))
    if "state" in columns:
        trials = trials.sort_values("state", key=lambda states: states != "running", kind="stable")
    rows = trials[columns].replace({"stage": STAGES}).itertuples(index=False) if columns else ()
    heads = {"best_value": f"best {record.config.get('select', 'value')}"}
    return [heads.get(name, name.replace("_", " ")) for name in columns], [
        [to_json(value) for value in row] for row in rows
    ]


@dataclass(frozen=True)
class DrawnFigure:
    """A figure as SVG and what it shows here, or the reason why there is none."""

    figure: Figure
    here: str
    svg: str | None
    reason: str | None


def draw_figures(record: Any, diagnosis: Diagnosis) -> list[DrawnFigure]:
    """Draw every figure of the report, in the order of the page: those of a study of its own come first there."""
    known = getattr(record, "facts", None) or {}
    kind = getattr(record, "study", {}).get("kind", "diagnosis")
    order = FIGURES if kind == "diagnosis" else sorted(FIGURES, key=lambda figure: not figure.own)
    belong = [f for f in order if (f.facts is None or f.facts in known) and f.kind in (None, kind)]
    belong = [f for f in belong if f.applies is None or f.applies(record, diagnosis)]
    drawn = [draw_figure(figure, record, diagnosis) for figure in belong]
    return [item for item in drawn if not item.figure.own or item.svg is not None]


def write_figures(drawn: Sequence[DrawnFigure], folder: Path) -> None:
    """Write every figure as `name.svg` into `folder`; an older one that has nothing to show any more is removed."""
    shown = {item.figure.name: item.svg for item in drawn if item.svg is not None}
    for figure in FIGURES:
        path = folder / f"{figure.name}.svg"
        if figure.name in shown:
            write_atomic(path, standalone_svg(shown[figure.name]).encode())
        else:
            path.unlink(missing_ok=True)


def shown_here(figure: Figure, record: Any, diagnosis: Diagnosis) -> str:
    """Return one or two sentences with the numbers that a figure draws of this record, "" where there is nothing to say."""
    try:
        numbers = figure.numbers(record, diagnosis) if figure.numbers else ""
    except (KeyError, IndexError, TypeError, ValueError, UsageError):
        numbers = ""  # a record of another kind lacks these columns; the findings still speak
    codes = [] if numbers and figure.alone else [code for code in figure.codes if code in diagnosis]
    quiet = {
        f.code for f in diagnosis.findings if f.status == "ok"
        and (f.summary.startswith(("Not seen", "Does not apply")) or (diagnosis.verdict == "fail" and f.code not in MEASUREMENTS))
    }  # fmt: skip
    said = [diagnosis[c].summary for c in codes if diagnosis[c].status != "not_measured" and c not in quiet]
    sentences = [part for line in (numbers, *said) if line for part in re.split(r"(?<=[.!]) (?=[A-Z])", line)]
    return " ".join(dict.fromkeys(sentences))


def draw_figure(figure: Figure, record: Any, diagnosis: Diagnosis) -> DrawnFigure:
    """Draw one figure for a page, with what it shows here in words."""
    here = shown_here(figure, record, diagnosis)
    alt = shown_line(f"{figure.shows} {here}".strip())
    try:
        svg, reason = inline_svg(
            lambda ax: figure.draw(record, diagnosis, ax=ax), key=figure.name, alt=alt, size=figure.size
        )
    except WorkbenchError as error:
        svg, reason = None, str(error).rstrip(".")
    return DrawnFigure(figure, here, svg, reason)
