"""`Diagnosis`: findings about one record, as text, as a table, as JSON that is written and read back."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from workbench.errors import RecordError
from workbench.findings.answers import Answer, answers, came_back
from workbench.findings.audited import Audited
from workbench.findings.causes import and_more, causes_first, listed
from workbench.findings.finding import MEASUREMENTS, STATUSES, SYMBOLS, Finding, Status, said_alike, worst
from workbench.record.folder import read_json
from workbench.record.json_values import to_json
from workbench.record.missing import not_ended

SIGNS = {"fail": ("✕", "fail"), "warn": ("!", "warn"), "not_measured": ("?", "not measured"), "ok": ("✓", "ok")}
"""Symbol and word of each status; colour only repeats what they say."""

_VOID = "not applicable"
_COUNTED = (*(SIGNS[status][1] for status in STATUSES), _VOID)

MAX_ROWS = 12
"""Of a diagnosis with no more findings than this, one study's, all are rows: its answer may be one that is well (rule of thumb)."""

_COLOURS = {
    status: f"color-mix(in srgb, currentColor 40%, {hue})"  # dark on a light page, light on a dark one
    for status, hue in (("fail", "#d32f2f"), ("warn", "#e65100"), ("not_measured", "#607d8b"), ("ok", "#2e7d32"))
}
_LEFT = "text-align: left; vertical-align: top"


def verdict_table(diagnosis: Diagnosis) -> str:
    """Return the verdict as HTML in which every text is escaped: badge, answers, and a table of the findings that no answer tells."""
    told, rest = diagnosis.told()
    after = {f.code: then for f, then in listed(diagnosis.findings)}
    columns = ("finding", "what was found", *["value"] * any(f.value is not None for f in told))
    header = "".join(f'<th scope="col" style="{_LEFT}">{name}</th>' for name in columns)
    advised: set[str] = set()
    groups = said_alike(told, joins=lambda f: not after[f.code])
    rows = "\n".join(_table_row(alike, advised, after[alike[0].code], len(columns)) for alike in groups)
    parts = [f"<p><strong>{escape(diagnosis.title)}</strong> {_badge(*diagnosis.badge)} {escape(diagnosis.tally)}</p>"]
    if diagnosis.answers:
        lines = (
            f'<tr><th scope="row" style="{_LEFT}; white-space: nowrap">{escape(a.question)}</th>'
            f'<td style="{_LEFT}">{_badge(a.status)}</td><td style="{_LEFT}">{escape(a.text)}</td></tr>'
            for a in diagnosis.answers
        )
        parts.append("<table>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table>")
    if told:
        parts.append(f"<table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>")
    if alike := diagnosis.same_reason():
        parts.append(_folded(f"{SIGNS['not_measured'][0]} {len(alike)} more not measured for the reason above", alike))
    if rest:
        parts.append(_folded(f"{SIGNS['ok'][0]} {well(rest, more=bool(told))}", rest))
    return "\n".join(parts)


def well(findings: Sequence[Finding], *, more: bool) -> str:
    """Return "52 more are ok, 16 do not apply", "1 check is ok"."""
    void = sum(not f.applies for f in findings)
    made = len(findings) - void
    what = f"{made} {'more' if more else 'check' if made == 1 else 'checks'} {'is' if made == 1 else 'are'} ok"
    return what + (f", {void} {'do' if void > 1 else 'does'} not apply" if void else "")


def _badge(status: Status, word: str = "") -> str:
    shown = f"{SIGNS[status][0]} {word or SIGNS[status][1]}"
    return f'<span style="color: {_COLOURS[status]}; white-space: nowrap"><strong>{shown}</strong></span>'


def badge(statuses: Sequence[Status]) -> tuple[Status, str]:
    """Return the status and the words that stand for all of these: "ok, 1 not measured" where no check alarms and most were made (rule of thumb: more than half)."""
    whole, missing = worst(statuses), statuses.count("not_measured")
    if whole == "not_measured" and missing < len(statuses) / 2:
        return "ok", f"ok, {missing} not measured"
    return whole, SIGNS[whole][1]


def _folded(title: str, findings: Sequence[Finding], *, signs: bool = False) -> str:
    lines = "\n".join(
        f"<li>{SIGNS[f.status][0] + ' ' if signs else ''}<code>{escape(f.code)}</code> {escape(f.summary)}</li>" for f in findings
    )  # fmt: skip
    return f"<details><summary>{escape(title)}</summary>\n<ul>\n{lines}\n</ul></details>"


def _table_row(alike: Sequence[Finding], advised: set[str], followers: Sequence[Finding], columns: int) -> str:
    """Return the row of findings that say the same of several codes, with what follows from it and the first advice that no row above gave."""
    finding = alike[0]
    lines = [line for line in finding.advice[:1] if finding.status != "ok" and line not in advised]
    advised.update(lines)
    advice = "".join(f"<br>{'Try: ' * (not line.startswith('Try '))}{escape(line)}" for line in lines)
    follow = _folded(f"{len(followers)} more follow from it", followers, signs=True) if followers else ""
    clauses = {f.code: f' title="clause {escape(f.clause)}"' for f in alike if f.clause}
    codes = (f"<code{clauses.get(name, '')}>{escape(name)}</code>" for name in names_of(alike))
    cells = (
        "<br>".join([_badge(finding.status), *codes]),
        escape(finding.summary) + advice + follow,
        escape(finding.quantity(finding.value)),
    )
    return "<tr>" + "".join(f'<td style="{_LEFT}">{cell}</td>' for cell in cells[:columns]) + "</tr>"


SCHEMA = 1
WIDTH = 110
"""Columns of a printed diagnosis."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings of one or more stems over one record; its repr is readable.

    Attributes:
        findings: each code exactly once.
        workload: name of the workload.
        command: what reproduces it.
        cost: steps, seconds and baseline_runs, where known.
        recommendation: config, changed fields, baseline and recommended results, adopted.
        path: the study's folder.
        left: which trials have not ended, and what was not asked; "" for none.
    """

    findings: tuple[Finding, ...]
    workload: str | None = None
    command: str | None = None
    cost: Mapping[str, Any] = field(default_factory=dict)
    recommendation: Mapping[str, Any] | None = None
    path: Path | None = None
    left: str = ""

    @classmethod
    def of(cls, record: Audited, findings: Iterable[Finding]) -> Diagnosis:
        """Return the findings about a record, with its workload, command and folder."""
        path, left = getattr(record, "path", None), not_ended(record)
        return cls(findings=tuple(findings), workload=record.workload, command=record.command, path=path, left=left)

    @property
    def verdict(self) -> Status:
        """The worst status: fail > warn > not_measured > ok."""
        return worst([f.status for f in self.findings])

    def __getitem__(self, code: str) -> Finding:
        """Return the finding with this code; `KeyError` lists the codes there are."""
        for finding in self.findings:
            if finding.code == code:
                return finding
        raise KeyError(f"no finding {code!r}; there are: {', '.join(f.code for f in self.findings)}")

    def __contains__(self, code: object) -> bool:
        """Tell whether a finding with this code is here."""
        return any(f.code == code for f in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        """Iterate over the findings."""
        return iter(self.findings)

    def __add__(self, other: Diagnosis) -> Diagnosis:
        """Join two diagnoses of the same record; this one's workload, command, cost and path win."""
        return replace(
            self, findings=self.findings + other.findings, recommendation=self.recommendation or other.recommendation
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of `diagnosis.json`."""
        return {
            "schema": SCHEMA,
            "workload": self.workload,
            "command": self.command,
            "verdict": self.verdict,
            "badge": self.badge[1],
            "cost": to_json(self.cost),
            "findings": [f.to_dict() for f in self.findings],
            "recommendation": to_json(self.recommendation),
        }

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The four questions that a training is asked, answered; none of a study that asks for less than all of them."""
        return answers(self.findings, self.recommendation)

    @property
    def undecided(self) -> bool:
        """Whether there is no config to train with and no line to change: something has to be mended or measured first."""
        found = self.recommendation or {}
        known = found.get("changed") or found.get("lines")
        return not known and any(a.question == "Config" and a.status != "ok" for a in self.answers)

    @property
    def badge(self) -> tuple[Status, str]:
        """The status, for colour and symbol, and the words of the badge: as `verdict`, but that a few checks that could not be made are counted beside "ok"."""
        return badge([f.status for f in self.findings])

    @property
    def title(self) -> str:
        """What was diagnosed."""
        return f"Diagnosis of {self.workload or 'a record'}"

    @property
    def tally(self) -> str:
        """How many findings that stand for themselves have which status; of what the badge tells already, the sum alone."""
        left = f"; {self.left}" if self.left else ""
        if self.badge[1] != SIGNS[self.badge[0]][1]:
            return f"{len(self.findings)} checks{left}"
        counts = Counter(SIGNS[f.status][1] if f.applies else _VOID for f, _ in listed(self.findings))
        shown = ", ".join(f"{counts[word]} {word}" for word in _COUNTED if counts[word]) or "nothing was checked"
        return f"{shown}{and_more(self.findings)}{left}"

    def told(self) -> tuple[list[Finding], list[Finding]]:
        """Return the findings that a reader is shown in full beside the answers, causes first; and those that are well, to be folded."""
        few = len(self.findings) <= MAX_ROWS
        ranked = [f for f, _ in listed(self.findings)]
        answered = {code for answer in self.answers for code in answer.codes}
        measured = {f.code for f in ranked if f.code in MEASUREMENTS and f.applies}
        told = [f for f in ranked if few or f.status != "ok" or f.code in measured or came_back(f)]
        said = {answer.text.removesuffix(".") for answer in self.answers}
        news = [f for f in told if f.code not in answered and f.summary.removesuffix(".") not in said]
        return news, [f for f in ranked if f not in told]

    def same_reason(self) -> list[Finding]:
        """Return what was not measured for a reason that an answer gives."""
        answered = {code for answer in self.answers for code in answer.codes}
        said = {answer.text for answer in self.answers}
        return [f for f in self.findings if f.status == "not_measured" and f.summary in said and f.code not in answered]

    def __repr__(self) -> str:
        """Return the verdict for a terminal: answers, then what none of them tells, causes first; what is said alike is said once; what to change and to try."""
        told, rest = self.told()
        lines = [f"{self.title}  [{self.badge[1]}]  {self.tally}"]
        lines += [_paragraph(a.status, a.text, a.question, wide=17) for a in self.answers]
        after = {f.code: then for f, then in listed(self.findings)}
        for answer in self.answers:
            said = [code for code in answer.codes if after.get(code)]
            lines += _codes([f for code in said for f in after[code]], said=said)
        lines += _told([(f, after[f.code]) for f in told])
        if alike := self.same_reason():
            lines.append(_paragraph("not_measured", f"{len(alike)} more not measured for the reason above: {', '.join(names_of(alike))}"))  # fmt: skip
        if rest:
            where = " in the report" if self.recommendation else ""
            where = where or (f" (`workbench report {self.path}` shows it)" if self.path else "")
            lines.append(_paragraph("ok", f"{well(rest, more=bool(told))}: each with its evidence{where}"))
        limit = textwrap.wrap(
            f"Budget: {self.budget}.", 100, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
        )
        return "\n".join([*lines, *self._change(), *self._next(), *(["", *limit] if self.budget else [])])

    @property
    def budget(self) -> str:
        """What the budget did not pay for, and the command or the call that goes on; "" where it paid for all."""
        told = str(self.cost.get("budget", ""))
        if (self.command or "").startswith("workbench ") or self.path is None:
            return told.replace("this folder (--out)", f"--out {self.path}" if self.path else "its folder as --out")
        of_program = (self.recommendation or {}).get("lines") is not None
        kept = re.findall(r"\b(?:steps|proof_seeds)=\d+", self.command or "")
        name = ", ".join([f"diagnose_function({self.workload}" if of_program else "diagnose(workload", *kept])
        call = rf'the same call goes on from there: wb.{name}, out="{self.path.as_posix()}", budget='
        return re.sub(
            r"the same command.* --budget (\S+), .*", lambda found: f'{call}"{found[1]}"), or "none" for no limit', told
        )

    def _change(self) -> list[str]:
        """Return the config to train with, or a program's lines to change, and why a candidate for it was not adopted."""
        found = self.recommendation or {}
        if not found.get("paste") or self.undecided:
            return []
        # else the answer says it
        reason = [textwrap.fill(str(found["reason"]), 100)] if found.get("candidate") and found.get("reason") else []
        what, purpose = ("Config", "to train with") if found.get("lines") is None else ("Lines", "to change")
        if found.get("changed") and not found.get("proof"):
            purpose = "worth trying"
        elif what == "Config" and not found.get("changed"):
            purpose += " (unchanged)"
        return ["", f"{what} {purpose}:", str(found["paste"]), *reason]

    def _next(self, most: int = 3) -> list[str]:
        """Return what to try next; of a whole diagnosis the first few lines, which the recommended config does not follow already."""
        if self.recommendation is None:
            lines = self.advice()
            most = len(lines)
        else:
            lines = list(self.recommendation.get("next") or ())
        more = f" (the first {most} of {len(lines)}; the report has all)" if len(lines) > most else ""
        numbered = (f"{number}. {line}" for number, line in enumerate(lines[:most], start=1))
        told = [textwrap.fill(line, 100, subsequent_indent="   ") for line in numbered]
        return ["", f"What to try next{more}:", *told] if told else []

    def advice(self) -> list[str]:
        """Return the advice of what is not well, causes first and each line once."""
        told = [f for f in causes_first(self.findings) if f.status != "ok"]
        return list(dict.fromkeys(line for finding in told for line in finding.advice))

    def rows(self) -> dict[str, Any]:
        """Return the verdict in short, for a notebook's output: no evidence, numbers to six digits."""
        fields = ("code", "status", "summary", "value", "unit", "threshold", "step", "clause", "follows_from")
        short = [{name: _six(getattr(f, name)) for name in fields} for f in causes_first(self.findings)]
        return {"schema": SCHEMA, "workload": self.workload, "verdict": self.verdict, "findings": short}

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:  # noqa: ARG002
        return {
            "text/plain": repr(self),
            "text/html": verdict_table(self),
            "application/vnd.workbench.verdict+json": self.rows(),
        }


def _paragraph(status: Status, text: str, code: str = "", *, wide: int = 26) -> str:
    """Return a line of one status, continued below its text where it is long."""
    start = f"  {SYMBOLS[status]} " + (f"{code:<{wide}} " if code else "")
    below = " " * (len(start) if code else len(start) + 2)
    return textwrap.fill(start + text, WIDTH, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)


def _told(told: Sequence[tuple[Finding, Sequence[Finding]]]) -> list[str]:
    """Return one paragraph a group of findings that say the same, each with what follows from it below."""
    after = {f.code: then for f, then in told}
    lines = []
    for group in said_alike((f for f, _ in told), joins=lambda f: not after[f.code]):
        finding = group[0]
        if len(group) > 1:
            lines.append(
                _paragraph(finding.status, f"{finding.summary} {len(group)} checks: {', '.join(names_of(group))}.")
            )
        else:
            lines.append(_paragraph(finding.status, finding.summary, finding.code))
        lines += _codes(after[finding.code])
    return lines


def names_of(group: Sequence[Finding]) -> list[str]:
    """Return the codes of findings; of more than a reader takes in, how many there are of each area."""
    areas = Counter(f.code.partition(".")[0] for f in group)
    return [f.code for f in group] if len(group) <= MAX_ROWS else [f"{area}.* ({n})" for area, n in areas.items()]


def _codes(followers: Sequence[Finding], *, said: Sequence[str] = ()) -> list[str]:
    """Return the codes of what follows from a finding, in one paragraph."""
    of = f"From {', '.join(said)} follow: " if said else "From it follow: "
    text = of + ", ".join(f"{SYMBOLS[f.status]} {f.code}" for f in followers)
    return [_below(text)] if followers else []


def _below(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6)  # under the code


def _six(value: Any) -> Any:
    """Return a number to six digits: the rest differs between processors."""
    plain = to_json(value)
    return float(f"{plain:.6g}") if isinstance(plain, float) else plain


_INFINITE = {"inf": float("inf"), "-inf": float("-inf")}
_NUMBERS = ("value", "threshold")


def read_diagnosis(path: str | Path) -> Diagnosis:
    """Return the diagnosis that a study's folder, or a `diagnosis.json`, holds."""
    file = Path(path)
    if file.is_dir():
        file /= "diagnosis.json"
    if not file.exists():
        raise RecordError(f"{file} is missing: the study was not diagnosed, or the folder is another one.")
    try:
        values = read_json(file)
    except RecordError as error:
        raise RecordError(f"{file} is damaged; diagnose the study again, which reads its trials from disk.") from error
    try:
        return Diagnosis(
            findings=tuple(_finding(finding) for finding in values["findings"]),
            workload=values["workload"],
            command=values["command"],
            cost=values["cost"],
            recommendation=values["recommendation"],
            path=file.parent,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{file} cannot be read ({error}); diagnose the study again.") from error


def _finding(values: dict[str, Any]) -> Finding:
    numbers = {name: _INFINITE.get(values[name], values[name]) for name in _NUMBERS}
    return Finding(**{**values, **numbers, "advice": tuple(values["advice"])})
