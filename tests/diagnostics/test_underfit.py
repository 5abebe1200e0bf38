"""A model that is far behind a linear one on its own training examples is said to be; all others are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.findings.audited import Audit
from workbench.findings.causes import causes_first, vetoes_tuning
from workbench.findings.finding import Finding
from workbench.topics.generalisation.diagnose import diagnose_underfit

CODE = "evaluation.underfits"


def said(score: float | None, *, best: float = 0.9, chance: float = 0.1, classes: int | None = 10, examples: int = 1000,
         selected: float | None = None, sticks: Any = None, kind: str | None = "classes") -> Finding:  # fmt: skip
    def side(value: float | None) -> dict[str, Any]:
        known = {} if value is None else {"score": value, "chance": chance, "classes": classes}
        return {"train": {"examples": examples, "loss": 1.0, "se": 0.01, **known}}

    trained = {"last": side(score), "selected": side(score if selected is None else selected)}
    yardsticks = {"classes": classes, "score": {"linear": best, "neighbours": 0.2}, "chance": chance}
    facts = {"generalisation": trained, "data": {"yardsticks": yardsticks if sticks is None else sticks}}
    facts["one_batch"] = {"loss": {"kind": kind}}
    return diagnose_underfit(Audit(facts=facts, workload="x"))[CODE]


@pytest.mark.parametrize(
    ("found", "status"),
    [
        # half the skill of 0.9 above 0.1 is 0.5, three quarters are 0.7; four standard errors on 1,000 examples are 0.063 and 0.06
        (said(0.43), "fail"), (said(0.45), "warn"), (said(0.63), "warn"), (said(0.65), "ok"),
        (said(0.43, examples=100), "warn"), (said(0.53, examples=100), "ok"), (said(0.43, selected=0.8), "ok"),
        (said(0.12, best=0.29), "ok"), (said(0.12, best=0.31), "fail"), (said(0.05, chance=0.05, best=0.26), "fail"),
        (said(0.3, best=0.8, chance=0.0, classes=None), "fail"), (said(0.5, best=0.6, chance=0.0, classes=None), "ok"),
        (said(-0.7, best=0.8, chance=0.0, classes=None), "ok"), (said(None), "ok"), (said(0.1, sticks={"reason": "text"}), "ok"),
    ],
)  # fmt: skip
def test_a_share_of_the_skill_of_the_better_yardstick_is_asked_for(found: Finding, status: str) -> None:
    assert found.status == status, found.summary
    assert ("linear model: accuracy" in found.summary or "linear model: correlation" in found.summary) is (
        status != "ok"
    )


@pytest.mark.parametrize(
    ("kind", "status"), [("classes", "fail"), ("binary", "fail"), ("regression", "ok"), (None, "ok")]
)
def test_the_largest_output_is_a_class_only_where_the_loss_takes_outputs_for_scores(
    kind: str | None, status: str
) -> None:
    """Of an embedding, a reconstruction or the thresholds of ordered grades it is none, though every example has a label."""
    assert said(0.01, kind=kind).status == status


def test_without_a_trained_baseline_nothing_is_said() -> None:
    for facts in ({}, {"generalisation": {"reason": "the baseline is diverged"}}):
        assert diagnose_underfit(Audit(facts=facts, workload="x"))[CODE].status == "not_measured"


@pytest.mark.parametrize(
    "cause", ["data.scale", "loop.no_gradient", "lr.too_low", "lr.too_high", "optimizers.constants"]
)
def test_it_follows_from_whatever_else_is_wrong(cause: str) -> None:
    found = causes_first([said(0.2), Finding(code=cause, status="warn", summary="planted")])
    assert [(f.code, f.follows_from) for f in found] == [(cause, None), (CODE, cause)]
    assert vetoes_tuning([said(0.2)]) == (), "a better learning rate may cure it"
