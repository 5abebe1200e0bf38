"""The adviser: order by kind, and every line complete (F2.9, F2.10)."""

from __future__ import annotations

from operator import attrgetter

import pytest

import workbench
from workbench.findings.advice import ADVICE, Kind, advise


@pytest.mark.parametrize(("kind", "first"), [("early", ["warmup", "clip"]), ("mid", ["clip"])])
def test_the_kind_decides_what_comes_first_and_a_smaller_lr_is_always_last(kind: Kind, first: list[str]) -> None:
    lines = advise(kind)
    assert all(word in line.lower() for word, line in zip(first, lines, strict=False))
    assert "last resort" in lines[-1]
    assert sum("learning rate only as the last resort" in line for line in lines) == 1
    assert len(lines) == len(set(lines)) == len(ADVICE)


def test_the_studies_it_names_exist() -> None:
    named = {advice.study for advice in ADVICE.values() if advice.study}
    assert named
    assert all("run" in dir(attrgetter(name)(workbench)) for name in named)
