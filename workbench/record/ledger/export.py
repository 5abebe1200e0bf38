"""The table of studies as a file that a spreadsheet opens: CSV or XLSX."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from workbench.errors import UsageError
from workbench.record.ledger.index import list_studies
from workbench.record.parts import write_atomic

__all__ = ["export_studies"]

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet would compute instead of show."""
WIDEST = 60
"""Characters; longer texts wrap."""


def export_studies(
    path: str | Path, root: str | Path = "runs", *, extra: Sequence[str] = (), ledger: str | None = None
) -> Path:
    """Write the table of studies as .csv or .xlsx and return where (P5.1).

    Text that a spreadsheet would take for a formula, such as a note that begins with "=", stays text: quoted in CSV by a
    leading apostrophe.

    Args:
        path: the file; its ending says which kind.
        root: folder of the studies.
        extra: names of further columns.
        ledger: address of a shared ledger, see `list_studies`.

    Raises:
        UsageError: the ending is neither.
        RecordError: there is no such folder, or the file cannot be written.
    """
    target = Path(path)
    kinds = {".csv": _csv, ".xlsx": _xlsx}
    if target.suffix.lower() not in kinds:
        raise UsageError(f"{str(target)!r} must end in {' or '.join(kinds)}: that says which kind of file is written.")
    table = list_studies(root, extra=extra, ledger=ledger)
    write_atomic(target, kinds[target.suffix.lower()](table))
    return target


def _csv(table: pd.DataFrame) -> bytes:
    rows = [[_quoted(cell) for cell in row] for row in table.itertuples(index=False)]
    return pd.DataFrame(rows, columns=table.columns).to_csv(index=False, lineterminator="\n").encode()


def _quoted(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


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
