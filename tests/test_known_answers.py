"""The examples of docs/known_answers.md run as they stand, and what they assert holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "known_answers.md").read_text()
BLOCKS = dict(re.findall(r"## `(\w+)`.*?```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize("name", ["quadratic", "catapult", "valley"])
def test_the_answer_is_the_formula(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "assert " in BLOCKS[name]
    exec(BLOCKS[name], {})
