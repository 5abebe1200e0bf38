"""What is said of fourteen kept studies, one of each kind, stays word for word and number for number what it was.

A difference that is meant is written down by `python -m tests.golden.canned --say`, and listed in the changelog with its reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.canned import SAID, STUDIES, unpack
from tests.golden.said import helps, said_of

DIGITS = 1e-6
"""Relative difference of numbers that are computed anew from those of the record; written ones are compared as text."""


@pytest.mark.parametrize("kind", STUDIES)
def test_what_is_said_of_a_kept_study_stays_what_it_was(kind: str, tmp_path: Path) -> None:
    before = json.loads((SAID / f"{kind}.json").read_text())
    now = json.loads(json.dumps(said_of(unpack(kind, tmp_path))))
    assert list(differences(before, now)) == []


def test_the_command_line_says_what_it_did() -> None:
    now = helps()
    assert {"diagnose", "report", "studies", "run"} <= set(now)
    assert list(differences(json.loads((SAID / "cli.json").read_text()), now)) == []


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield the places at which two JSON values differ; numbers may by rounding."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            yield from differences(before.get(name), now.get(name), f"{where}/{name}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for k, (a, b) in enumerate(zip(before, now, strict=True)):
            yield from differences(a, b, f"{where}/{k}")
    elif isinstance(before, float) and isinstance(now, float):
        if not (math.isclose(before, now, rel_tol=DIGITS, abs_tol=1e-12) or (math.isnan(before) and math.isnan(now))):
            yield f"{where}: {before!r} is now {now!r}"
    elif before != now:
        yield f"{where}: {before!r} is now {now!r}"


def test_a_difference_is_found_wherever_it_is() -> None:
    before = {"a": [1.0, {"b": "x"}], "c": None}
    assert list(differences(before, {"a": [1.0 + 1e-9, {"b": "x"}], "c": None})) == []
    assert list(differences(before, {"a": [1.001, {"b": "y"}]})) == ["/a/0: 1.0 is now 1.001", "/a/1/b: 'x' is now 'y'"]
