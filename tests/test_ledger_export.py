"""The table as a spreadsheet, read back by other code; text is never a formula."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import openpyxl
import pandas as pd
import pytest

from tests.test_ledger import study
from tests.test_record_writer import CONFIG, opened
from workbench import cli
from workbench.errors import RecordError, UsageError
from workbench.record.ledger.export import export_studies
from workbench.record.ledger.index import COLUMNS, list_studies

NASTY = ['=HYPERLINK("http://x")', "+1", "-1", "@sum", 'two\nlines, and a "quote"', "bell \x07 rings", "é – ü"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    study(tmp_path / "one")
    for number, note in enumerate(NASTY):
        opened(tmp_path / f"n{number}", config=CONFIG, note=note).close()
    return tmp_path


def test_csv_is_read_back(root: Path) -> None:
    table = list_studies(root)
    path = export_studies(root / "t.csv", root)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    assert [row["study"] for row in rows] == table["study"].tolist()
    assert [row["trials"] for row in rows] == [str(n) for n in table["trials"]]
    notes = dict(zip(table["study"], [row["note"] for row in rows], strict=True))
    assert notes["n0"] == "'" + NASTY[0], "a spreadsheet would compute it"
    assert notes["n4"] == NASTY[4]
    assert notes["n6"] == NASTY[6]


def test_xlsx_is_read_back_and_nothing_is_a_formula(root: Path) -> None:
    table = list_studies(root, extra=["failed"])
    path = export_studies(root / "t.xlsx", root, extra=["failed"])
    sheet = openpyxl.load_workbook(path).active
    head, *rows = sheet.iter_rows()
    assert [cell.value for cell in head] == [*COLUMNS, "failed"]
    assert len(rows) == len(table)
    for cells, expected in zip(rows, table.itertuples(index=False), strict=True):
        assert all(cell.data_type != "f" for cell in cells)
        for cell, value in zip(cells, expected, strict=True):
            if isinstance(value, float) and math.isnan(value):
                assert cell.value is None
            elif isinstance(value, str):
                assert cell.value == value.replace("\x07", "")
            else:
                assert cell.value == value
    link = rows[0][COLUMNS.index("config")].hyperlink
    assert link.target == (root / "n0" / "config.json").resolve().as_uri()
    assert pd.read_excel(path).shape == (len(table), 7)


@pytest.mark.parametrize("kind", [".csv", ".xlsx"])
def test_no_study_is_a_table_with_its_head(tmp_path: Path, kind: str) -> None:
    path = export_studies(tmp_path / f"t{kind}", tmp_path)
    read = pd.read_csv(path) if kind == ".csv" else pd.read_excel(path)
    assert read.columns.tolist() == COLUMNS
    assert read.empty


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in \.csv or \.xlsx"):
        export_studies(tmp_path / "t.ods", tmp_path)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write"):
        export_studies(tmp_path / "file" / "t.csv", tmp_path)


def test_from_the_command_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = root / "table.xlsx"
    assert cli.main(["studies", str(root), "--columns", "failed, select", "--export", str(target)]) == 0
    out = capsys.readouterr().out
    assert f"Table: {target}" in out
    assert "failed:    2" in out
    assert pd.read_excel(target).columns.tolist() == [*COLUMNS, "failed", "select"]
    assert cli.main(["studies", str(root), "--columns", "nothing"]) == 2
    assert "no further column 'nothing'" in capsys.readouterr().err
