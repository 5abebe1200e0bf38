"""`said_of`: everything that is said of a study on disk, as JSON values: diagnosis, report, summary and the numbers in the figures."""

from __future__ import annotations

import html
import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.cli import main
from workbench.playbook import diagnosis_of
from workbench.record.read import open_record
from workbench.report.summary import summarise
from workbench.report.write import write_report
from workbench.topics.registry import FIGURES


def said_of(folder: Path) -> dict[str, Any]:
    """Return what is said of the study in a folder; nothing in it depends on where the folder is."""
    record = open_record(folder)
    diagnosis = diagnosis_of(record)
    known = {k: v for k, v in diagnosis.to_dict().items() if k not in ("path", "command")}
    with patch.object(Figure, "savefig", _nothing):  # the numbers are read from the figures themselves, below
        page = write_report(record, diagnosis, folder / "report.html").read_text()
    return {
        "diagnosis": known,
        "summary": summarise(record, diagnosis),
        "report": _text(page.replace(str(folder), "FOLDER")),
        "figures": {figure.name: _numbers(figure, record, diagnosis) for figure in FIGURES},
    }


def _nothing(figure: Figure, file: Any, **_: Any) -> None:
    file.write('<svg viewBox="0 0 1 1"></svg>')


def helps() -> dict[str, str]:
    """Return what the command line says of itself, and of each command, 100 columns wide."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        said = {"workbench": _help([])}
        return said | {name: _help([name]) for name in re.findall(r"^    (\w[\w-]*) ", said["workbench"], re.MULTILINE)}
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _help(words: list[str]) -> str:
    page = io.StringIO()
    with redirect_stdout(page):
        main([*words, "--help"])
    return page.getvalue()


def _text(page: str) -> list[str]:
    """Return the lines that a reader of the page sees, figures left out."""
    body = re.sub(r"<(style|script|svg)\b.*?</\1>", "", page[page.index("<body") :], flags=re.DOTALL)
    lines = (html.unescape(re.sub(r"<[^>]+>", " ", line)).split() for line in body.split("\n"))
    return [" ".join(words) for words in lines if words]


def _numbers(figure: Any, record: Any, diagnosis: Any) -> Any:
    """Return title, labels and, of each line, how many points it has, their sums and last values; why it is not drawn."""
    own = Figure()
    try:
        figure.draw(record, diagnosis, ax=own.subplots())
    except Exception as error:  # a figure that has nothing to show says so by its error
        return f"{type(error).__name__}: {error}"
    return [_axes(ax) for ax in own.axes]


def _axes(ax: Axes) -> dict[str, Any]:
    lines = [(line.get_label(), *map(_column, line.get_data())) for line in ax.get_lines()]
    points = [_column(np.asarray(c.get_offsets())) for c in ax.collections if np.asarray(c.get_offsets()).size]
    texts = sorted(t.get_text() for t in ax.texts)
    return {
        "title": ax.get_title(),
        "x": ax.get_xlabel(),
        "y": ax.get_ylabel(),
        "lines": lines,
        "points": points,
        "texts": texts,
    }


def _column(values: Any) -> list[float]:
    known = np.asarray(values, dtype=np.float64).ravel()
    finite = known[np.isfinite(known)]
    ends = [float(finite[0]), float(finite[-1])] if finite.size else []
    return [float(known.size), float(finite.sum()), *ends]
