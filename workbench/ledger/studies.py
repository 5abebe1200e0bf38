"""The table of studies to read, to export as CSV or XLSX, and to write notes into (P5)."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from workbench.errors import RecordError, UsageError
from workbench.ledger.table import COLUMNS, check_extra, read_folders
from workbench.record.folder import lock, runs_root, write_atomic, write_json
from workbench.record.read import StudyRecord
from workbench.record.redact import redact

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet would compute instead of show
WIDEST = 60  # characters; longer texts wrap


def list_studies(root: str | Path | None = None, *, extra: Sequence[str] = ()) -> pd.DataFrame:
    """Return the six required columns of every study, one row a study (P5.1 to P5.7).

    Args:
        root: folder of the studies, None is the project's `runs`, which are read themselves: the table is right while a study runs, and after a crash. One that
            cannot be read is a warning that names it.
        extra: names of further columns, of `EXTRA`: workload, kind, state, created, failed, diverged, unfinished, left, best_trial,
            best_step, best_lr, seeds, mean_value, select, config_sha256, commit, tags, verdict, alarms, lr_best, lr_unstable.

    Raises:
        RecordError: there is no such folder.
        UsageError: there is no such column.
    """
    check_extra(extra)
    rows, problems = read_folders(Path(root or runs_root()))
    for problem in problems:
        logging.getLogger(__name__).warning("left out of the table: %s", problem)
    return pd.DataFrame(rows, columns=[*COLUMNS, *extra])


def export_studies(path: str | Path, root: str | Path | None = None, *, extra: Sequence[str] = ()) -> Path:
    """Write the table of studies as .csv or .xlsx and return where (P5.1).

    Text that a spreadsheet would take for a formula, such as a note that begins with "=", stays text: quoted in CSV by a
    leading apostrophe.

    Args:
        path: the file; its ending says which kind. The others as for `list_studies`.

    Raises:
        UsageError: the ending is neither.
        RecordError: there is no such folder, or the file cannot be written.
    """
    target = Path(path)
    kinds = {".csv": csv_text, ".xlsx": _xlsx}
    if target.suffix.lower() not in kinds:
        raise UsageError(f"{str(target)!r} must end in {' or '.join(kinds)}: that says which kind of file is written.")
    write_atomic(target, kinds[target.suffix.lower()](list_studies(root, extra=extra)))
    return target


def set_note(path: str | Path, note: str) -> str:
    """Write another note into a study's folder; return it as it was written, on one line.

    Raises:
        UsageError: the note is empty (P5.4).
        RecordError: there is no study, it is damaged or of a newer version, another process is writing it, or it cannot be
            written; then it is as it was.
    """
    folder, said = Path(path), redact(" ".join(note.split()))
    if not said:
        raise UsageError("the note is empty: say in a few words what this study is for (P5.4). The old one stays.")
    if not (folder / "study.json").exists():
        raise RecordError(f"{folder} holds no study (no study.json), so there is nothing to write a note to.")
    _ = StudyRecord(folder).study  # damaged, or of a newer version
    with lock(folder):
        study = StudyRecord(folder).study
        if study.get("note") != said:
            write_json(folder / "study.json", study | {"note": said})
    return said


def csv_text(table: pd.DataFrame) -> bytes:
    """Return a table as CSV; text that a spreadsheet would take for a formula is quoted by an apostrophe."""
    quoted = table.map(lambda cell: f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell)
    return quoted.to_csv(index=False, lineterminator="\n").encode()


def _xlsx(table: pd.DataFrame) -> bytes:
    import openpyxl
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
    from openpyxl.styles import Alignment, Font
    from openpyxl.utils import get_column_letter

    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "studies"
    for column, name in enumerate(table.columns, start=1):
        sheet.cell(1, column, str(name)).font = Font(bold=True)
        longest = len(str(name))
        for row, value in enumerate(table[name], start=2):
            text = isinstance(value, str)
            known = None if not text and pd.isna(value) else value
            cell = sheet.cell(row, column, ILLEGAL_CHARACTERS_RE.sub("", value) if text else known)
            cell.alignment = Alignment(vertical="top", wrap_text=text)
            if text:
                cell.data_type = "s"  # never a formula
                longest = max(longest, *(len(line) for line in value.split("\n")))
            if name == "config" and text and Path(value).is_file():
                cell.hyperlink = Path(value).resolve().as_uri()
                cell.font = Font(underline="single", color="0563C1")
        sheet.column_dimensions[get_column_letter(column)].width = min(longest, WIDEST) + 2
    sheet.freeze_panes = "B2"
    content = io.BytesIO()
    book.save(content)
    return content.getvalue()
