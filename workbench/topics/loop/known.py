"""What a record tells of a loop: its facts, where it has them, and the rows of the run that they were seen in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from workbench.curves.trial_curves import RecordLike
from workbench.findings.finding import Codes, Finding
from workbench.record.roles import Role


class MissingFact(KeyError):
    """A fact that a record lacks, as of a version that did not collect it."""


class _Facts(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise MissingFact(name)


def facts_of(value: Any) -> Any:
    """Return JSON values as they are, except that a name which an object lacks raises `MissingFact`."""
    if isinstance(value, Mapping):
        return _Facts({key: facts_of(part) for key, part in value.items()})
    return [facts_of(part) for part in value] if isinstance(value, list) else value


def where_known(
    codes: Codes, names: Iterable[str], judge: Callable[[], Finding | Iterable[Finding]]
) -> Iterable[Finding]:
    """Return what `judge` finds; each of the codes `names` as not measured where it needs a fact that the record lacks."""
    try:
        found = judge()
        return [found] if isinstance(found, Finding) else list(found)
    except MissingFact as missing:
        reason = f"the record was made by a version that did not collect {missing.args[0]!r}; watch the loop again"
        return [codes.not_measured(name, reason) for name in names]


def rows_of(record: RecordLike) -> pd.DataFrame:
    """Return the steps of the trial that the facts of the loop are of: the first baseline of a study."""
    trials, steps = record.trials, record.steps
    if not len(trials) or "trial" not in steps:
        return steps
    own = trials[trials["stage"] == Role.BASELINE] if "stage" in trials else trials
    mine: pd.DataFrame = steps[steps["trial"] == (own if len(own) else trials)["trial"].iloc[0]]
    return mine


def at(lines: Mapping[str, str], *tokens: str, also: Mapping[str, str] | None = None) -> str:
    """Return " (train.py:31)" for the first of these calls whose line is known, "" where none is; `also` names others by what they do, as in " (train.py:31; softmax in train.py:12)"."""
    known = [line for line in (next((lines[token] for token in tokens if lines.get(token)), ""),) if line]
    known += [f"{what} in {lines[token]}" for what, token in (also or {}).items() if lines.get(token)]
    return f" ({'; '.join(known)})" if known else ""
