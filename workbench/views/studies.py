"""`studies_panel`: every study and trial of a folder to filter, sort, open and compare, with its note and what reproduces it (P5)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anywidget
import pandas as pd
import traitlets

from workbench.errors import UsageError, WorkbenchError
from workbench.ledger.studies import set_note
from workbench.plots.svg import is_live
from workbench.record.folder import runs_root
from workbench.record.json_values import to_json
from workbench.views.studies_data import (
    JUDGED,
    STUDY_COLUMNS,
    compare,
    draw_comparison,
    draw_curves,
    draw_study,
    nothing,
    open_study,
    side,
    study_table,
)


def studies_panel(folder: str | Path | None = None, *, live: bool | None = None) -> Any:
    """Return the study browser over a folder; a table alone where nobody can use it.

    Type to filter; a click on a column's head sorts; a click on a row, or Enter, opens a study: its trials with the best first, its
    picture, its note to edit, and the command that reproduces it to copy. Select two or more studies or trials (the box, or the space bar) to
    compare their configs, best values and curves. Studies that are running are read as they are; nothing is locked.

    Args:
        folder: of the studies, as in `list_studies`; None is the project's `runs`.
        live: None asks the environment: `WORKBENCH_LIVE=0` means that nobody is looking.

    Returns:
        A widget, or the table as a frame; a notebook shows either when it is the last line of a cell.

    Source: P5.1 to P5.7 for the columns, P5.4 for the note.
    """
    root = Path(folder or runs_root())
    table, problems = study_table(root)
    if not is_live(live):
        for problem in problems if len(table) else [nothing(root), *problems]:
            logging.getLogger(__name__).warning("%s", problem)
        return table[STUDY_COLUMNS]
    return StudiesWidget(root, found=(table, problems))


def _plain(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with None where a value is missing."""
    values = table.astype(object)
    return values.where(values.notna(), None)


class StudiesWidget(anywidget.AnyWidget):
    """All studies of a folder, one of them opened, some compared.

    Attributes:
        problems: why folders could not be read.
        opened: the open study, see `open_study`; empty without one.
        compared: see `compare`; empty without one.
        drafts: notes that were typed and not written, by path.
        said: the answer to what was asked last: `text`, and whether it is `bad`.
    """

    _esm = Path(__file__).with_name("studies.js")
    _css = Path(__file__).with_name("studies.css")

    folder = traitlets.Unicode().tag(sync=True)
    columns = traitlets.List(traitlets.Unicode()).tag(sync=True)
    studies: Any = traitlets.List().tag(sync=True)
    problems = traitlets.List(traitlets.Unicode()).tag(sync=True)
    nothing = traitlets.Unicode().tag(sync=True)
    opened = traitlets.Dict().tag(sync=True)
    figure = traitlets.Unicode().tag(sync=True)
    compared = traitlets.Dict().tag(sync=True)
    comparison = traitlets.Unicode().tag(sync=True)
    drafts = traitlets.Dict().tag(sync=True)
    said = traitlets.Dict().tag(sync=True)

    def __init__(self, root: Path, *, found: tuple[pd.DataFrame, list[str]]) -> None:
        self._root, self._asked = root, 0
        self._paths = _paths(found[0])
        super().__init__(folder=str(root), columns=STUDY_COLUMNS, **_rows(root, found))
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        """Return the folder and how many studies there are."""
        return f"studies_panel({self.folder!r}): {len(self.studies)} studies"

    def read(self) -> None:
        """Read the folders anew, and the open study with them."""
        found = study_table(self._root)
        self._paths = _paths(found[0])
        for name, value in _rows(self._root, found).items():
            setattr(self, name, value)
        if self.opened:
            self.show(self.opened["row"]["path"])

    def show(self, path: str) -> None:
        """Open one study: its trials first, then its picture."""
        opened, record = open_study(path)
        self.opened = opened
        if len(opened["trials"]) > JUDGED and len(record.steps):
            self.figure = draw_curves(record).html()  # to judge all of them takes a second or two
        picture = draw_study(record)
        self.figure = "" if picture is None else picture.html()

    def compare(self, sides: list[tuple[str, int | None]]) -> None:
        """Compare studies, or trials: each a path, and a trial's number or None."""
        found = [side(path, trial) for path, trial in sides]
        self.compared = compare(found)
        self.comparison = draw_comparison(found).html()

    def note(self, path: str, note: str) -> None:
        """Write another note into a study."""
        written = set_note(path, note)
        self.drafts = {other: text for other, text in self.drafts.items() if other != path}
        self.studies = [row | {"note": written} if row["path"] == path else row for row in self.studies]
        if self.opened and self.opened["row"]["path"] == path:
            self.opened = self.opened | {"row": self.opened["row"] | {"note": written}}

    def _answer(self, _: Any, asked: dict[str, Any], __: Any) -> None:
        """Do what the page asks; what goes wrong is said in the page and nowhere else: it shows no traceback of a callback."""
        bad = True
        try:
            said, bad = self._do(asked), False
        except WorkbenchError as error:
            said = str(error)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        self._asked += 1
        self.said = {"text": said, "bad": bad, "number": self._asked}

    def _do(self, asked: dict[str, Any]) -> str:
        if asked["do"] == "read":
            self.read()
            return f"{len(self.studies)} studies, as they are now."
        if asked["do"] == "open":
            self.show(self._listed(asked["path"]))
            return f"{self.opened['row']['study']} is open."
        if asked["do"] == "compare":
            self.compare([(self._listed(path), trial) for path, trial in asked["sides"]])
            return f"{len(self.compared['names'])} are compared below."
        if asked["do"] == "note":
            self.note(self._listed(asked["path"]), asked["note"])
            return "The note is written."
        raise UsageError(f"the page asked for {asked['do']!r}, which is not known here.")

    def _listed(self, path: str) -> str:
        """Return a path that the page names; a page reads and writes the studies that it lists, and no other folder."""
        if path not in self._paths:
            raise UsageError(
                f"{path} is not among the studies listed here; read them again, or give its folder to studies_panel."
            )
        return path


def _paths(table: pd.DataFrame) -> frozenset[str]:
    """The folders that a page may name, kept apart from the rows, which a page can change."""
    return frozenset(map(str, table["path"]))


def _rows(root: Path, found: tuple[pd.DataFrame, list[str]]) -> dict[str, Any]:
    table, problems = found
    names = [*STUDY_COLUMNS, "seeds", "kind", "reproduce", "path"]
    rows = _plain(table.reindex(columns=names)).to_dict("records")
    return {"studies": to_json(rows), "problems": problems, "nothing": "" if rows else nothing(root)}
