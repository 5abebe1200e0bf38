"""What the study browser shows, read from the folders: rows of studies, one opened study, its picture. Nothing is held or changed."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import WorkbenchError
from workbench.ledger.studies import list_studies
from workbench.ledger.table import EXTRA, read_folders, study_row
from workbench.playbook.records import diagnosis_of
from workbench.plots.render import png
from workbench.record.json_values import to_json
from workbench.record.read import StudyRecord
from workbench.topics.lr_sweep.figures import plot_loss_curves, plot_lr_sweep
from workbench.views.summary import study_picture

__all__ = [
    "STUDY_COLUMNS",
    "OpenedStudy",
    "best_trials",
    "draw_study",
    "nothing",
    "open_study",
    "study_table",
    "varied",
]

STUDY_COLUMNS = ["study", "workload", "kind", "state", "trials", "failed", "best_value", "created", "note"]
"""What a row of the table of studies shows; `path` and `reproduce` go with it unseen."""
CURVES = 4
"""Trials whose curves are drawn of a large study: more cannot be told apart at a glance (rule of thumb)."""
JUDGED = 64
"""Trials up to which a study is diagnosed for its picture: more would take longer than a person likes to wait (rule of thumb)."""
_RUN = ("trial", "stage", "state", "best_value", "best_step", "steps_run", "seconds")
_SWEEPS = ("lr_sweep", "instability", "diagnosis")


@dataclass(frozen=True, kw_only=True)
class OpenedStudy:
    """One study, as the browser shows it.

    Attributes:
        row: its row in the table of studies.
        columns: of the trials: number, state and results, and the config fields that differ.
        trials: one row a trial, the best first.
        select: the metric that selects, and what is better.
        said: one sentence on what it found.
    """

    row: dict[str, Any]
    columns: list[str]
    trials: list[dict[str, Any]]
    select: str
    said: str

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        fields = {"row": self.row, "columns": self.columns, "trials": self.trials, "select": self.select}
        plain: dict[str, Any] = to_json(fields | {"said": self.said})
        return plain


def study_table(root: Path, *, ledger: str | None = None) -> tuple[pd.DataFrame, list[str]]:
    """Return the table of studies, the newest first, and why some could not be read.

    Args:
        root: folder of the studies.
        ledger: address of a shared ledger, see `list_studies`; its studies of other machines have no `path`.

    Raises:
        RecordError: the ledger cannot be reached.
        UsageError: `ledger` is no address.
    """
    if ledger is None:
        rows, problems = read_folders(root) if root.is_dir() else ([], [])
        table = pd.DataFrame(rows, columns=[*STUDY_COLUMNS, "reproduce", "path"])
    else:
        table, problems = list_studies(root, extra=[name for name in EXTRA if name in STUDY_COLUMNS], ledger=ledger), []
        folders = [Path(str(link)).parent for link in table["config"]]
        table["path"] = [str(f) if (f / "study.json").exists() else "" for f in folders]
    return table.sort_values("created", ascending=False, kind="stable", ignore_index=True), problems


def nothing(folder: Path) -> str:
    """Say that there is no study, and what makes one."""
    where = f"No studies in {folder}" if folder.is_dir() else f"There is no folder {folder} here"
    return f"{where}: workbench diagnose digits_mlp makes one, as does any study of a notebook. Give another folder, or run one."


def open_study(path: str | Path) -> tuple[OpenedStudy, StudyRecord]:
    """Read one study for showing, and return its record too, from which pictures are drawn.

    Raises:
        RecordError: there is none, it is damaged or of a newer version.
    """
    record = StudyRecord(Path(path))
    row = study_row(record.path) | {"path": str(path)}
    trials = best_trials(record)
    fields = [name for name in varied(trials) if name != "seed"]
    columns = [name for name in ("trial", "stage", "state", *fields, "seed", *_RUN[3:]) if name in trials]
    select = f"{record.config['select']} ({record.config['select_mode']})"
    rows = trials[columns].to_dict("records") if len(trials) else []
    opened = OpenedStudy(
        row=row,
        columns=columns,
        trials=[{str(name): value for name, value in row.items()} for row in rows],
        select=select,
        said=_said(record, trials),
    )
    return opened, record


def best_trials(record: StudyRecord) -> pd.DataFrame:
    """Return the table of trials, the best value first, those without one last."""
    trials = record.trials
    if not len(trials):
        return trials
    ascending = record.config["select_mode"] == "min"
    return trials.sort_values(["best_value", "trial"], ascending=[ascending, True], kind="stable", ignore_index=True)


def varied(trials: pd.DataFrame) -> list[str]:
    """Return the config fields in which trials differ, in the order of the config."""
    known = {*_RUN, "seed", "train_examples", "gradients", "lanes", "shared_seed", "per_host_seed"}
    return [str(name) for name in trials.columns if name not in known and len(set(trials[name].astype(str))) > 1]


def draw_study(record: StudyRecord) -> bytes | None:
    """Return the study's picture as PNG; None where no trial has a step on disk yet.

    A study of up to `JUDGED` trials, and one whose diagnosis is kept, has the picture of its kind, as `show_study` draws it. Any other
    has the sweep, where it is one, and the loss curves of its best trials.
    """
    trials = best_trials(record)
    if not len(trials) or record.steps.empty:
        return None
    with contextlib.suppress(
        WorkbenchError, LookupError, TypeError, ValueError, AttributeError
    ):  # not of this kind's making
        if (record.path / "diagnosis.json").exists() or len(trials) <= JUDGED:
            return study_picture(record, diagnosis_of(record))
    if record.study.get("kind") in _SWEEPS and len(set(trials["peak_lr"])) > 1:
        return png([partial(_sweep, record), partial(_curves, record, trials)])
    return draw_curves(record)


def draw_curves(record: StudyRecord) -> bytes:
    """Return the loss curves of the study's best trials as PNG: of a large study the picture that is there at once."""
    return png([partial(_curves, record, best_trials(record))])


def _sweep(record: StudyRecord, ax: Any) -> Any:
    return plot_lr_sweep(record, ax=ax)


def _curves(record: StudyRecord, trials: pd.DataFrame, ax: Any) -> Any:
    return plot_loss_curves(record, trials=[int(t) for t in trials["trial"].head(CURVES)], ax=ax)


def _said(record: StudyRecord, trials: pd.DataFrame) -> str:
    """One sentence: how many trials came to what, and which is best."""
    if not len(trials):
        return "No trial yet."
    states = ", ".join(f"{count} {state}" for state, count in trials["state"].value_counts().items())
    best = trials.iloc[0]
    if not math.isfinite(best["best_value"]):
        return f"{len(trials)} trials ({states}); none has a value of {record.config['select']} yet."
    return (
        f"{len(trials)} trials ({states}). The best, trial {int(best['trial'])}, has {record.config['select']} "
        f"{best['best_value']:.4g} at step {int(best['best_step'] or 0):,}."
    )
