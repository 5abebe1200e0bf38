"""What nbval takes for the same output, and what not: digits may differ, verdicts, sizes and tables may not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.notebooks.shapes import Said, Verdict

ANSWER = "- **ok** Best: 0.07071; 0.05 to 0.14 train equally well.\n\nTrainConfig(\n    peak_lr=0.07071,\n    total_steps=2000,\n)"
TABLE = (
    "<table><thead><tr><th>lr</th><th>loss</th></tr></thead><tbody><tr><td>0.1</td><td>2.30</td></tr></tbody></table>"
)
FOUND = "<ul>\n<li><code>lr.best</code> In other runs: at lr 0.3 from step 54.</li>\n</ul>"
VERDICT: dict[str, Any] = {
    "verdict": "ok", "workload": "digits_mlp",
    "findings": [{"code": "lr.best", "status": "ok", "value": 0.0707}, {"code": "lr.at_edge", "status": "ok", "value": None}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (ANSWER, ANSWER.replace("0.07071", "0.07072"), True),
        (ANSWER, ANSWER.replace("0.07071", "0.05946").replace("equally well", "equally well; one larger lr was stable"), True),
        (ANSWER, ANSWER.replace("**ok**", "**warn**"), False),
        (ANSWER, ANSWER.replace("peak_lr=0.07071", "peak_lr=0.7072"), False),
        (ANSWER, ANSWER.replace("peak_lr", "momentum"), False),
        (ANSWER, ANSWER.replace("    total_steps=2000,\n", ""), False),
        (TABLE, TABLE.replace("2.30", "nan"), True),
        (TABLE, TABLE.replace("loss", "accuracy"), False),
        (TABLE, TABLE.replace("<tr><td>0.1</td><td>2.30</td></tr>", ""), False),
        (TABLE, TABLE.replace("</tbody>", "<tr><td>1</td><td>2</td></tr></tbody>"), False),
        (FOUND, FOUND.replace("lr 0.3 from step 54", "lr 0.8 from step 41 (seen in 2 trials)"), True),
        (FOUND, FOUND.replace("lr.best", "lr.worst"), False),
        ("17 trials, 0 diverged", "18 trials, 0 diverged", True),
        ("17 trials, 0 diverged", "17 trials, 2 diverged", False),
    ],
)  # fmt: skip
def test_texts(before: str, after: str, same: bool) -> None:
    assert (Said(before) == Said(after)) is same
    assert (Said(before) != Said(after)) is not same


@pytest.mark.parametrize(
    ("place", "entry", "value", "same"),
    [
        (0, "value", 0.0841, True), (0, "value", 0.9, False), (0, "value", None, False), (1, "value", 3.0, False),
        (1, "status", "warn", False), (0, "code", "lr.worst", False),
    ],
)  # fmt: skip
def test_verdicts(place: int, entry: str, value: object, same: bool) -> None:
    changed = copy.deepcopy(VERDICT)
    changed["findings"][place][entry] = value
    assert (Verdict(VERDICT) == Verdict(changed)) is same
    assert Verdict(VERDICT) != Verdict(VERDICT | {"verdict": "fail"})
