"""`studies_panel`: every study and trial of a folder to filter, sort, open and compare, with its note and what reproduces it (P5)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.panels.base import is_live
from workbench.report.html import table as html_table
from workbench.report.html import text
from workbench.views.studies_data import STUDY_COLUMNS, nothing, study_table

__all__ = ["StudiesTable", "studies_panel"]


@dataclass(frozen=True, repr=False)
class StudiesTable:
    """The studies of a folder as a table that stays as it is: for a notebook that nobody is looking at.

    Attributes:
        table: one row a study, the newest first.
        folder: of the studies.
        problems: why folders could not be read.
    """

    table: pd.DataFrame
    folder: Path
    problems: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the table as text, without the column of commands, or what to run where it is empty."""
        if not len(self.table):
            return "\n".join([nothing(self.folder), *self.problems])
        shown = self.table[[name for name in STUDY_COLUMNS if name in self.table]]
        return "\n".join([shown.to_string(index=False, float_format="{:.4g}".format), *self.problems])

    def _repr_html_(self) -> str:
        problems = "".join(f"<p>{text(problem)}</p>" for problem in self.problems)
        if not len(self.table):
            return f"<p>{text(nothing(self.folder))}</p>{problems}"
        names = [name for name in [*STUDY_COLUMNS, "reproduce"] if name in self.table]
        rows = [[_shown(value) for value in row] for row in self.table[names].itertuples(index=False)]
        return html_table(names, rows) + problems


def studies_panel(folder: str | Path = "runs", *, ledger: str | None = None, live: bool | None = None) -> Any:
    """Return the study browser over a folder; a table alone where nobody can use it.

    Type to filter; a click on a column's head sorts; a click on a row, or Enter, opens a study: its trials with the best first, its
    picture, its note to edit, and the command that reproduces it to copy. Mark two studies or trials (the box, or the space bar) to
    compare their configs, best values and curves. Studies that are running are read as they are; nothing is locked.

    Args:
        folder: of the studies, as in `list_studies`.
        ledger: address of a shared ledger; "" takes the one in WORKBENCH_LEDGER. Studies of other machines are listed only.
        live: None asks the environment: `WORKBENCH_LIVE=0` means that nobody is looking.

    Returns:
        A widget, or a `StudiesTable`; a notebook shows either when it is the last line of a cell.

    Raises:
        RecordError: the ledger cannot be reached.
        UsageError: `ledger` is no address.

    Source: P5.1 to P5.7 for the columns, P5.4 for the note.
    """
    root = Path(folder)
    table, problems = study_table(root, ledger=ledger)
    if not is_live(live):
        return StudiesTable(table, root, tuple(problems))
    from workbench.views.studies_widget import StudiesWidget

    return StudiesWidget(root, ledger=ledger, found=(table, problems))


def _shown(value: Any) -> Any:
    return None if value is None or value is pd.NA else value.item() if hasattr(value, "item") else value
