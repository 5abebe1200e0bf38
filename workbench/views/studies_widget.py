"""The study browser's widget: what a page asks of it, and what it answers. The page's own part is studies.js."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import pandas as pd
import traitlets

from workbench.errors import UsageError, WorkbenchError
from workbench.ledger.studies import set_note
from workbench.record.json_values import to_json
from workbench.views.studies_compare import compare, draw_comparison, side
from workbench.views.studies_data import (
    JUDGED,
    STUDY_COLUMNS,
    draw_curves,
    draw_study,
    nothing,
    open_study,
    study_table,
)

__all__ = ["StudiesWidget"]

_HERE = Path(__file__).parent


class StudiesWidget(anywidget.AnyWidget):
    """All studies of a folder, one of them opened, two compared.

    Attributes:
        folder: of the studies.
        studies: one row a study.
        problems: why folders could not be read.
        opened: the open study, see `OpenedStudy`; empty without one.
        figure: its picture, PNG.
        compared: see `compare`; empty without one.
        comparison: both curves, PNG.
        drafts: notes that were typed and not written, by path.
        said: the answer to what was asked last: `text`, and whether it is `bad`.
    """

    _esm = _HERE / "studies.js"
    _css = _HERE / "studies.css"

    folder = traitlets.Unicode().tag(sync=True)
    columns = traitlets.List(traitlets.Unicode()).tag(sync=True)
    studies: Any = traitlets.List().tag(sync=True)
    problems = traitlets.List(traitlets.Unicode()).tag(sync=True)
    nothing = traitlets.Unicode().tag(sync=True)
    opened = traitlets.Dict().tag(sync=True)
    figure = traitlets.Bytes().tag(sync=True)
    compared = traitlets.Dict().tag(sync=True)
    comparison = traitlets.Bytes().tag(sync=True)
    drafts = traitlets.Dict().tag(sync=True)
    said = traitlets.Dict().tag(sync=True)

    def __init__(self, root: Path, *, ledger: str | None, found: tuple[pd.DataFrame, list[str]]) -> None:
        self._root, self._ledger, self._asked = root, ledger, 0
        self._paths = _paths(found[0])
        super().__init__(folder=str(root), columns=STUDY_COLUMNS, **_rows(root, found))
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        """Return the folder and how many studies there are."""
        return f"studies_panel({self.folder!r}): {len(self.studies)} studies"

    def read(self) -> None:
        """Read the folders anew, and the open study with them."""
        found = study_table(self._root, ledger=self._ledger)
        self._paths = _paths(found[0])
        for name, value in _rows(self._root, found).items():
            setattr(self, name, value)
        if self.opened:
            self.show(self.opened["row"]["path"])

    def show(self, path: str) -> None:
        """Open one study: its trials first, then its picture."""
        opened, record = open_study(path)
        self.opened = opened.to_dict()
        if len(opened.trials) > JUDGED and len(record.steps):
            self.figure = draw_curves(record)  # to judge all of them takes a second or two
        self.figure = draw_study(record) or b""

    def compare(self, sides: list[tuple[str, int | None]]) -> None:
        """Compare two studies, or two trials: each a path, and a trial's number or None."""
        left, right = (side(path, trial) for path, trial in sides)
        self.compared = compare(left, right)
        self.comparison = draw_comparison(left, right)

    def note(self, path: str, note: str) -> None:
        """Write another note into a study."""
        written = set_note(path, note)
        self.drafts = {other: text for other, text in self.drafts.items() if other != path}
        self.studies = [row | {"note": written} if row["path"] == path else row for row in self.studies]
        if self.opened and self.opened["row"]["path"] == path:
            self.opened = self.opened | {"row": self.opened["row"] | {"note": written}}

    def _answer(self, _: Any, asked: dict[str, Any], __: Any) -> None:
        """Do what the page asks; what goes wrong is said in the page and nowhere else."""
        try:
            said = self._do(asked)
        except WorkbenchError as error:
            self._say(str(error), bad=True)
        except Exception as error:  # a page shows no traceback of a callback
            self._say(f"{type(error).__name__}: {error}", bad=True)
        else:
            self._say(said, bad=False)

    def _do(self, asked: dict[str, Any]) -> str:
        if asked["do"] == "read":
            self.read()
            return f"{len(self.studies)} studies, as they are now."
        if asked["do"] == "open":
            self.show(self._listed(asked["path"]))
            return f"{self.opened['row']['study']} is open below."
        if asked["do"] == "compare":
            self.compare([(self._listed(path), trial) for path, trial in asked["sides"]])
            return str(self.compared["said"])
        if asked["do"] == "note":
            self.note(self._listed(asked["path"]), asked["note"])
            return "The note is written."
        raise UsageError(f"the page asked for {asked['do']!r}, which is not known here.")

    def _listed(self, path: str) -> str:
        """Return a path that the page names; a page reads and writes the studies that it lists, and no other folder."""
        if not path:
            raise UsageError("this study lies on another machine; the ledger knows its row only.")
        if path not in self._paths:
            raise UsageError(
                f"{path} is not among the studies listed here; read them again, or give its folder to studies_panel."
            )
        return path

    def _say(self, text: str, *, bad: bool) -> None:
        self._asked += 1
        self.said = {"text": text, "bad": bad, "number": self._asked}


def _paths(table: pd.DataFrame) -> frozenset[str]:
    """The folders that a page may name, kept apart from the rows, which a page can change."""
    return frozenset(map(str, table["path"].dropna())) - {""}


def _rows(root: Path, found: tuple[pd.DataFrame, list[str]]) -> dict[str, Any]:
    table, problems = found
    names = [*STUDY_COLUMNS, "reproduce", "path"]
    records = table.reindex(columns=names).astype(object)
    rows = records.where(records.notna(), None).to_dict("records")
    return {"studies": to_json(rows), "problems": problems, "nothing": "" if rows else nothing(root)}
