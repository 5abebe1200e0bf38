"""The examples of docs/known_answers.md run as they stand, and what they assert holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.pages import blocks


@pytest.mark.parametrize(("number", "name"), [(0, "quadratic"), (1, "catapult"), (2, "valley")])
def test_the_answer_is_the_formula(number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = blocks("known_answers.md")[number]
    assert f'load_workload("{name}")' in source
    assert "assert " in source
    exec(source, {})
