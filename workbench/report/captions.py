"""What a figure of the report shows here: one or two sentences with this record's numbers, under the picture.

The numbers are those that the figure draws: a finding's own sentence where a finding speaks of it, else a few quantiles.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure

__all__ = ["shown_here"]


def shown_here(figure: Figure, record: Any, diagnosis: Diagnosis) -> str:
    """Return what this figure shows in this record, "" where there is nothing to say.

    Args:
        figure: of a topic.
        record: a study or a trial.
        diagnosis: what was found in it.
    """
    try:
        numbers = figure.numbers(record, diagnosis) if figure.numbers else ""
    except (KeyError, IndexError, TypeError, ValueError, UsageError):
        numbers = ""  # a record of another kind lacks these columns; the findings still speak
    said = [] if numbers and figure.alone else [_said(code, diagnosis) for code in figure.codes]
    return " ".join(dict.fromkeys(line for line in (numbers, *said) if line))


def _said(code: str, diagnosis: Diagnosis) -> str:
    """A finding's sentence, where it has something to say."""
    if code not in diagnosis:
        return ""
    found = diagnosis[code]
    quiet = found.status == "not_measured" or (found.status == "ok" and found.summary.startswith("Not seen"))
    return "" if quiet else found.summary
