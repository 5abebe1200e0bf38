"""Many runs of one notebook, one after the other: every run has its copy, its study and its row in the summary.

A run that crashes stops none of the others. The same call into the same folder goes on: what is complete is kept.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import NotebookError, RecordError, UsageError
from workbench.findings.diagnosis import badge
from workbench.findings.finding import MEASUREMENTS, STATUSES, worst
from workbench.ledger.studies import csv_text
from workbench.ledger.table import study_row
from workbench.notebook.html import page
from workbench.notebook.parameters import check_parameters, check_values
from workbench.notebook.runner import (
    FOLDER,
    NotebookInfo,
    describe_notebook,
    is_complete,
    new_folder,
    read_verdict,
    run_notebook,
)
from workbench.record.folder import write_atomic
from workbench.report.templates import STATUS, render, shown_line

OUT = "out"
"""The parameter that names the folder of a notebook's study."""


@dataclass(frozen=True, kw_only=True)
class NotebookRun:
    """One run of a notebook.

    Attributes:
        state: "complete", "crashed" or "interrupted".
        verdicts: the diagnoses that its copy shows, as `read_verdict` returns them.
        seconds: that it took; next to nothing where it was kept.
        kept: whether it was complete already, from an earlier call into the same folder.
        notebook: its executed copy.
        best: metric and best value of its study, where there is one.
        study: folder of its study, where the notebook takes one.
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
    best: tuple[str, float] | None = None

    @property
    def verdict(self) -> str | None:
        """The worst verdict that it shows; None where it shows none."""
        return worst([v["verdict"] for v in self.verdicts]) if self.verdicts else None

    @property
    def said(self) -> str:
        """Its verdict, or how it ended where it did not reach its end."""
        found = [finding["status"] for verdict in self.verdicts for finding in verdict["findings"]]
        return self.state if self.state != "complete" else badge(found)[1] if self.verdicts else "none"

    def measured(self) -> dict[str, float]:
        """Return the values of its measurements by their codes, such as lr.best, and the best value by the name of its metric."""
        findings = [finding for verdict in self.verdicts for finding in verdict["findings"]]
        known = {
            f["code"]: float(f["value"]) for f in findings if f["code"] in MEASUREMENTS and f.get("value") is not None
        }
        return known | ({f"best {self.best[0]}": self.best[1]} if self.best else {})

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
        return f"{given}: {said}" + (f". {shown_line(self.error)}" if self.error else "")


@dataclass(frozen=True, kw_only=True, repr=False)
class NotebookRuns:
    """Many runs of one notebook, in order; its repr is the table of their verdicts and measurements. `where` is the folder that they ran in."""

    folder: Path
    title: str
    runs: tuple[NotebookRun, ...]
    where: Path = field(default_factory=Path)

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

        run, the parameters that differ, state, verdict (the worst), what was measured, the number of findings of each status, worst
        (codes of what failed or warns), seconds, study, notebook, error.
        """
        names, measured = self._differing(), self._measured()
        rows = [
            {
                "run": run.number,
                **{name: _shown(run.parameters.get(name, "default")) for name in names},
                "state": run.state,
                "verdict": run.verdict,
                **{name: run.measured().get(name) for name in measured},
                **run.counts(),
                "worst": ", ".join(run.worst_codes()),
                "seconds": round(run.seconds, 1),
                "study": run.study,
                "notebook": str(run.notebook),
                "error": shown_line(run.error) if run.error else None,
            }
            for run in self.runs
        ]
        return pd.DataFrame(rows)

    def _differing(self) -> list[str]:
        names = list(dict.fromkeys(name for run in self.runs for name in run.parameters))
        first = self.runs[0].parameters if self.runs else {}
        unset = object()
        return [n for n in names if any(run.parameters.get(n, unset) != first.get(n, unset) for run in self.runs[1:])]

    def _measured(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.measured()))

    def __repr__(self) -> str:
        """Return the table, what crashed, and where the copies are."""
        if not self.runs:
            return f"{self.title}: no run yet."
        shown = self.table[["run", *self._differing(), "verdict", *self._measured(), "worst"]]
        rows = shown.assign(verdict=[run.said for run in self.runs]).to_string(
            index=False, max_colwidth=60, float_format="{:.4g}".format, na_rep="–"
        )
        failed = [f"run {run.number} {run.state}: {shown_line(str(run.error))}" for run in self.crashed]
        return "\n".join([rows, *failed, f"Summary: {self.folder / 'summary.html'}"])

    def _repr_html_(self) -> str:
        return self._table_html(relative_to=Path.cwd())

    def _table_html(self, *, relative_to: Path, heading: bool = False) -> str:
        """The table as HTML, with links to the pages of the runs, or to their copies where no page was written."""
        names, measured, rows = self._differing(), self._measured(), []
        for run in self.runs:
            html = run.notebook.with_suffix(".html")
            symbol = STATUS[run.verdict][0] if run.verdict else "–"
            report = self.where / str(run.study) / "report.html"
            rows.append(
                {
                    "run": run,
                    "link": os.path.relpath(html if html.exists() else run.notebook, relative_to),
                    "given": [_shown(run.parameters.get(name, "default")) for name in names],
                    "said": f"{symbol if run.state == 'complete' else '✕'} {run.said}",
                    "measured": [run.measured().get(name) for name in measured],
                    "report": os.path.relpath(report, relative_to) if run.study and report.exists() else None,
                }
            )
        columns = ["run", *names, "verdict", *measured, "worst findings", "seconds"]
        return render(
            "runs.html.j2",
            Path(__file__).parent,
            runs=self,
            columns=columns,
            numeric=[*measured, "seconds"],
            rows=rows,
            heading=heading,
        )


def write_summary(runs: NotebookRuns) -> Path:
    """Write `summary.csv` and `summary.html` into the folder of the runs, and return the page's path."""
    write_atomic(runs.folder / "summary.csv", csv_text(runs.table))
    target = runs.folder / "summary.html"
    body = runs._table_html(relative_to=runs.folder, heading=True)
    write_atomic(target, page(f"{runs.title}: {len(runs.runs)} runs", body).encode())
    return target


def _shown(value: Any) -> Any:
    """A parameter as a table may show it: passwords cut out of texts, everything else as it is."""
    return shown_line(value) if isinstance(value, str) else value


def run_notebooks(
    name_or_path: str | Path,
    parameters: Sequence[Mapping[str, Any]],
    *,
    out: str | Path | None = None,
    cwd: str | Path | None = None,
    timeout_s: int | None = None,
    progress: bool = False,
) -> NotebookRuns:
    """Run a notebook once for each set of parameters, and return what came out, as a table of verdicts.

    The folder holds a copy and a page of each run, `001.ipynb` and `001.html`, and `summary.csv` and `summary.html`, which are
    written anew after every run. A notebook with a parameter `out` that is not given gets a study folder for each run,
    `runs/<name of the folder>-001`. Ctrl-C stops the run in progress; the same call with the same `out` resumes from there.

    Args:
        name_or_path: a file, or a name looked up in `./notebooks`, with or without its number.
        parameters: one mapping a run; all names, types and values are checked before the first kernel starts.
        out: folder for copies and summary; runs in it that are complete, of the same notebook with the same parameters, are kept.
            None is a new folder `runs/notebooks/<name>/`.
        cwd: folder that the notebooks run in; None is the current one.
        timeout_s: seconds that one cell may take; None is no limit.
        progress: say on standard error how far each run is, and what it came to.

    Raises:
        UnknownNameError: no such notebook, parameter, or value of one.
        UsageError: no parameters at all, the same run twice, a value of another type, or `out` is a file.
        KeyboardInterrupt: somebody stopped it; the summary says what there is.
    """
    info = describe_notebook(name_or_path)
    where = Path.cwd() if cwd is None else Path(cwd)
    values = [_checked(info, number, row, where) for number, row in enumerate(parameters, start=1)]
    if not values:
        raise UsageError("parameters=[] is no run at all: give one mapping a run, [{}] for the defaults alone.")
    for number, row in enumerate(values, start=1):
        if row in values[: number - 1]:
            raise UsageError(f"run {number} is the same as run {values.index(row) + 1} ({row}): leave one out.")
        if row.get(OUT) and row[OUT] in [other.get(OUT) for other in values[: number - 1]]:
            raise UsageError(
                f"run {number}: out={row[OUT]!r} is the study folder of an earlier run too. Leave {OUT} out, and each has its own."
            )
    folder = _folder(info, out)
    done = NotebookRuns(folder=folder, title=info.title, runs=(), where=where)
    for number, row in enumerate(values, start=1):
        takes_study = any(p.name == OUT and p.accepts("") for p in info.parameters)
        given = {OUT: f"runs/{folder.resolve().name}-{number:03d}", **row} if takes_study else row
        copy = folder / f"{number:03d}.ipynb"
        options: dict[str, Any] = {"cwd": cwd, "timeout_s": timeout_s, "progress": progress}
        run = _run(info, number, row, given=given, copy=copy, options=options)
        done = replace(done, runs=(*done.runs, run))
        write_summary(done)
        if progress:
            print(f"run {number} of {len(values)}: {run}", file=sys.stderr)
        if run.state == "interrupted":
            left = len(values) - number
            raise KeyboardInterrupt(
                f"run {number} of {len(values)} was stopped, {left} not begun; {folder} holds copies and summary. "
                f"The same command with --out {folder} resumes from there."
            )
    return done


def _checked(info: NotebookInfo, number: int, row: Mapping[str, Any], cwd: Path) -> dict[str, Any]:
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in row.items()}
    try:
        check_parameters(info.parameters, values)
        check_values(info.parameters, values, cwd=cwd)
    except UsageError as error:
        raise type(error)(f"run {number}: {error}") from None
    return values


def _folder(info: NotebookInfo, out: str | Path | None) -> Path:
    if out is None:
        return new_folder(info.path.stem)
    folder = Path(out)
    if folder.is_file() or folder.suffix == ".ipynb":
        raise UsageError(f"out={str(out)!r} is a file, and many runs need a folder, such as {str(FOLDER / 'sweep')!r}.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(
    info: NotebookInfo, number: int, row: dict[str, Any], *, given: dict[str, Any], copy: Path, options: dict[str, Any]
) -> NotebookRun:
    began, state, error = time.monotonic(), "complete", None
    kept = is_complete(copy, info.path, given)
    if not kept:
        try:
            run_notebook(info.path, given, output=copy, **options)
        except NotebookError as raised:
            state, error = "crashed", str(raised)
        except KeyboardInterrupt as raised:
            state, error = "interrupted", str(raised) or "interrupted"
    return NotebookRun(
        number=number,
        parameters=row,
        state=state,
        verdicts=tuple(read_verdict(copy, required=False)) if copy.exists() else (),
        seconds=time.monotonic() - began,
        kept=kept,
        notebook=copy,
        study=given.get(OUT) or None,
        error=error,
        best=_best(Path(options["cwd"] or ".") / str(given[OUT])) if given.get(OUT) else None,
    )


def _best(study: Path) -> tuple[str, float] | None:
    """Return the metric that selects in a study, and its best value, where there is one."""
    with contextlib.suppress(RecordError):
        row = study_row(study)
        if math.isfinite(row["best_value"]):
            return str(row["select"]).partition(" ")[0], float(row["best_value"])
    return None
