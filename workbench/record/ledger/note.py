"""The note of a study, written anew: what P5.4 asks for is often known only when the study has been looked at."""

from __future__ import annotations

import logging
from pathlib import Path

from workbench.errors import RecordError, UsageError
from workbench.record.json_values import dumps
from workbench.record.ledger import index as ledger
from workbench.record.lock import lock
from workbench.record.parts import write_atomic
from workbench.record.read import StudyRecord

__all__ = ["set_note"]

WAIT_S = 5.0
"""How long to wait for the ledger (rule of thumb): a person is waiting, and the folder has the note already."""


def set_note(path: str | Path, note: str) -> str:
    """Write another note into a study's folder, and into the ledger; return it as it was written, on one line.

    Args:
        path: the study's folder.
        note: a short description.

    Raises:
        UsageError: the note is empty (P5.4).
        RecordError: there is no study, it is damaged or of a newer version, another process is writing it, or it cannot be
            written; then it is as it was. A ledger that cannot be written is a warning: the folder is the truth.
    """
    folder, said = Path(path), " ".join(note.split())
    if not said:
        raise UsageError("the note is empty: say in a few words what this study is for (P5.4). The old one stays.")
    if not (folder / "study.json").exists():
        raise RecordError(f"{folder} holds no study (no study.json), so there is nothing to write a note to.")
    _ = StudyRecord(folder).study  # damaged, or of a newer version
    held = lock(folder)
    try:
        study = StudyRecord(folder).study
        if study.get("note") == said:
            return said
        write_atomic(folder / "study.json", dumps(study | {"note": said}).encode())
        if not (folder.parent / "study.json").exists():  # a part of another study has no row
            try:
                ledger.index(folder, wait_s=WAIT_S, trials=False)
            except RecordError as error:
                logging.getLogger(__name__).warning("%s", error)
    finally:
        held.close()
    return said
