"""What many runs of a notebook came to: one row a run, as a table, as `summary.csv` and as a page, `summary.html`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.findings.diagnosis import worst
from workbench.notebook.html import page
from workbench.record.parts import write_atomic
from workbench.report.html import STATUS, redact, text

__all__ = ["NotebookRun", "NotebookRuns", "write_summary"]

STATUSES = tuple(STATUS)
WORST_SHOWN = 3
"""Codes of the worst findings that a row names."""


@dataclass(frozen=True, kw_only=True)
class NotebookRun:
    """One run of a notebook.

    Attributes:
        number: from 1.
        parameters: what was set for it.
        state: "complete", "crashed" or "interrupted".
        verdicts: the diagnoses that its copy shows, as `read_verdict` returns them.
        seconds: that it took; next to nothing where it was kept.
        kept: whether it was complete already, from an earlier call into the same folder.
        notebook: its executed copy.
        study: folder of its study, where the notebook takes one.
        error: why it did not come to its end, None where it did.
    """

    number: int
    parameters: dict[str, Any]
    state: str
    verdicts: tuple[dict[str, Any], ...]
    seconds: float
    kept: bool
    notebook: Path
    study: str | None
    error: str | None

    @property
    def verdict(self) -> str | None:
        """The worst verdict that it shows; None where it shows none."""
        return worst([v["verdict"] for v in self.verdicts]) if self.verdicts else None

    def counts(self) -> dict[str, int]:
        """Return how many findings have each status."""
        found = [finding["status"] for verdict in self.verdicts for finding in verdict["findings"]]
        return {status: found.count(status) for status in STATUSES}

    def worst_codes(self) -> list[str]:
        """Return the codes of what fails and of what warns, in the order of their verdicts; what follows from them is left out."""
        findings = [finding for verdict in self.verdicts for finding in verdict["findings"]]
        alone = [f for f in findings if not f.get("follows_from")]
        return list(dict.fromkeys(f["code"] for status in STATUSES[:2] for f in alone if f["status"] == status))

    def __str__(self) -> str:
        """Return what it was given and what it came to, in a line."""
        given = ", ".join(f"{name}={_shown(value)}" for name, value in self.parameters.items()) or "defaults"
        came = self.verdict or ("no verdict" if self.state == "complete" else "")
        state = {"complete": "kept from before" if self.kept else "", "crashed": "CRASHED"}.get(self.state, self.state)
        said = ", ".join(part for part in (state, came, f"{self.seconds:.0f} s") if part)
        return f"{given}: {said}" + (f". {redact(self.error)}" if self.error else "")


@dataclass(frozen=True, kw_only=True, repr=False)
class NotebookRuns:
    """Many runs of one notebook; its repr is the table of their verdicts.

    Attributes:
        folder: of the copies and the summary.
        title: the notebook's.
        runs: in order.
    """

    folder: Path
    title: str
    runs: tuple[NotebookRun, ...]

    @property
    def verdict(self) -> str | None:
        """The worst verdict of all runs; None where none has one."""
        known = [run.verdict for run in self.runs if run.verdict is not None]
        return worst(known) if known else None  # type: ignore[arg-type]

    @property
    def crashed(self) -> tuple[NotebookRun, ...]:
        """The runs that did not come to their end."""
        return tuple(run for run in self.runs if run.state != "complete")

    @property
    def table(self) -> pd.DataFrame:
        """One row a run.

        run, the parameters that differ, state, verdict (the worst), the number of findings of each status, worst (codes of what
        failed or warns), seconds, study, notebook, error.
        """
        names = self._differing()
        rows = [
            {
                "run": run.number,
                **{name: _shown(run.parameters.get(name, "default")) for name in names},
                "state": run.state,
                "verdict": run.verdict,
                **run.counts(),
                "worst": ", ".join(run.worst_codes()),
                "seconds": round(run.seconds, 1),
                "study": run.study,
                "notebook": str(run.notebook),
                "error": redact(run.error) if run.error else None,
            }
            for run in self.runs
        ]
        return pd.DataFrame(rows)

    def _differing(self) -> list[str]:
        names = list(dict.fromkeys(name for run in self.runs for name in run.parameters))
        first = self.runs[0].parameters if self.runs else {}
        unset = object()
        return [n for n in names if any(run.parameters.get(n, unset) != first.get(n, unset) for run in self.runs[1:])]

    def __repr__(self) -> str:
        """Return the table, what crashed, and where the copies are."""
        if not self.runs:
            return f"{self.title}: no run yet."
        names = self._differing()
        rows = [("run", *names, "verdict", *STATUSES, "worst")]
        for run in self.runs:
            given = [str(_shown(run.parameters.get(name, "default"))) for name in names]
            codes = run.worst_codes()
            more = f", {len(codes) - WORST_SHOWN} more" if len(codes) > WORST_SHOWN else ""
            said = run.state if run.state != "complete" else run.verdict or "none"
            counts = [str(count) for count in run.counts().values()]
            rows.append((str(run.number), *given, said, *counts, ", ".join(codes[:WORST_SHOWN]) + more))
        wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows]
        failed = [f"run {run.number} {run.state}: {redact(str(run.error))}" for run in self.crashed]
        return "\n".join([*lines, *failed, f"Summary: {self.folder / 'summary.html'}"])

    def _repr_html_(self) -> str:
        return _body(self, relative_to=Path.cwd())


def write_summary(runs: NotebookRuns) -> Path:
    """Write `summary.csv` and `summary.html` into the folder of the runs, and return the page's path.

    Raises:
        RecordError: the folder cannot be written.
    """
    write_atomic(runs.folder / "summary.csv", runs.table.to_csv(index=False, lineterminator="\n").encode())
    target = runs.folder / "summary.html"
    head = f"<h1>{text(runs.title)}</h1>\n<p class='soft'>{len(runs.runs)} runs, worst verdict: {runs.verdict or 'none'}.</p>"
    write_atomic(
        target, page(f"{runs.title}: {len(runs.runs)} runs", head + _body(runs, relative_to=runs.folder)).encode()
    )
    return target


def _shown(value: Any) -> Any:
    """A parameter as a table may show it: passwords cut out of texts, everything else as it is."""
    return redact(value) if isinstance(value, str) else value


def _body(runs: NotebookRuns, *, relative_to: Path) -> str:
    """The table as HTML, with links to the pages of the runs, or to their copies where no page was written."""
    names = runs._differing()
    head = "".join(
        f'<th scope="col">{text(name)}</th>'
        for name in ("run", *names, "verdict", *STATUSES, "worst findings", "seconds")
    )
    rows = "\n".join(f"<tr>{_row(run, names, relative_to)}</tr>" for run in runs.runs)
    said = "".join(
        f'<p class="bad">Run {run.number} {run.state}: {text(redact(str(run.error)))}</p>\n' for run in runs.crashed
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>\n{said}"


def _row(run: NotebookRun, names: list[str], relative_to: Path) -> str:
    html = run.notebook.with_suffix(".html")
    link = os.path.relpath(html if html.exists() else run.notebook, relative_to)
    symbol, word = STATUS.get(run.verdict or "", ("–", "none"))
    said = f"{symbol} {word}" if run.state == "complete" else f"✕ {run.state}"
    given = "".join(f"<td>{text(_shown(run.parameters.get(name, 'default')))}</td>" for name in names)
    counts = "".join(f'<td class="number">{count}</td>' for count in run.counts().values())
    return (
        f'<td><a href="{text(link)}">{run.number}</a></td>{given}<td>{said}</td>{counts}'
        f'<td>{text(", ".join(run.worst_codes()) or "–")}</td><td class="number">{run.seconds:.0f}</td>'
    )
