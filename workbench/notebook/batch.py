"""Many runs of one notebook, one after the other: every run has its copy, its study and its row in the summary.

A run that crashes stops none of the others. The same call into the same folder goes on: what is complete is kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import NotebookError, UsageError
from workbench.notebook.parameters import check_parameters
from workbench.notebook.runner import (
    FOLDER,
    NotebookInfo,
    describe_notebook,
    is_complete,
    new_folder,
    read_verdict,
    run_notebook,
)
from workbench.notebook.summary import NotebookRun, NotebookRuns, write_summary
from workbench.notebook.values import check_values

__all__ = ["run_notebooks"]

OUT = "out"
"""The parameter that names the folder of a notebook's study."""


def run_notebooks(
    name_or_path: str | Path,
    parameters: Sequence[Mapping[str, Any]],
    *,
    out: str | Path | None = None,
    cwd: str | Path | None = None,
    timeout_s: int | None = None,
    html: bool = True,
    show_input: bool = True,
    progress: bool = False,
) -> NotebookRuns:
    """Run a notebook once for each set of parameters, and return what came out, as a table of verdicts.

    The folder holds a copy and a page of each run, `001.ipynb` and `001.html`, and `summary.csv` and `summary.html`, which are
    written anew after every run. A notebook with a parameter `out` that is not given gets a study folder for each run,
    `runs/<name of the folder>-001`. Ctrl-C stops the run in progress; the same call with the same `out` goes on from there.

    Args:
        name_or_path: a file, or a name looked up in `./notebooks`, with or without its number.
        parameters: one mapping a run; all names, types and values are checked before the first kernel starts.
        out: folder for copies and summary; runs in it that are complete, of the same notebook with the same parameters, are kept.
            None is a new folder `runs/notebooks/<name>/`.
        cwd: folder that the notebooks run in; None is the current one.
        timeout_s: seconds that one cell may take; None is no limit.
        html: whether pages of the runs are written.
        show_input: whether these pages show the code.
        progress: say on standard error what each run came to.

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
    done = NotebookRuns(folder=folder, title=info.title, runs=())
    for number, row in enumerate(values, start=1):
        given = _with_study(info, row, folder, number)
        copy = folder / f"{number:03d}.ipynb"
        options: dict[str, Any] = {"cwd": cwd, "timeout_s": timeout_s, "html": html, "show_input": show_input}
        run = _run(info, number, row, given=given, copy=copy, options=options)
        done = NotebookRuns(folder=folder, title=info.title, runs=(*done.runs, run))
        write_summary(done)
        if progress:
            print(f"run {number} of {len(values)}: {run}", file=sys.stderr)
        if run.state == "interrupted":
            left = len(values) - number
            raise KeyboardInterrupt(
                f"run {number} of {len(values)} was stopped, {left} not begun; {folder} holds copies and summary. "
                f"The same command with --out {folder} goes on from there."
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


def _with_study(info: NotebookInfo, row: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """Return the values with a study folder of the run's own, where the notebook takes one and none was given."""
    takes = any(p.name == OUT and p.accepts("") for p in info.parameters)
    return {**row, OUT: f"runs/{folder.resolve().name}-{number:03d}"} if takes and OUT not in row else row


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
    )
