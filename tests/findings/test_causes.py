"""The order of findings: causes before consequences, faults before remarks, and nothing lost or said twice."""

from __future__ import annotations

import itertools

import pytest

from workbench.findings.causes import _EXPLAINS, _PLACES, REMARKS, causes_first, listed, vetoes_tuning
from workbench.findings.diagnosis import Diagnosis, verdict_table
from workbench.findings.finding import Finding, Status

_NAMED = {*_PLACES, *REMARKS, *_EXPLAINS, *itertools.chain(*_EXPLAINS.values())}
CODES = sorted({code.replace("*", "other") for code in _NAMED})


def found(*alarms: str, status: Status = "warn") -> list[Finding]:
    """Findings by code, "code!" one that fails."""
    return [
        Finding(
            code=text.rstrip("!"), status="fail" if text.endswith("!") else status, summary=f"About {text}.", advice=(f"Mend {text}.",)
        )
        for text in alarms
    ]  # fmt: skip


@pytest.mark.parametrize("expected", [
    # inputs of size 10,000: all that goes wrong later goes wrong for it, be it worse
    {"data.scale": ["lr.nothing_learns!", "stability.early!", "init.loss"]},
    {"loop.no_gradient!": ["lr.too_low"]},
    # a group of parameters whose lr is zero: what has a gradient and does not move is no consequence of what has none
    {"loop.no_update!": [], "units.equal!": ["loop.no_gradient"]},
    {"units.dead": ["loop.no_gradient", "loop.no_update", "init.constant_output"]},
    {"loss.double_softmax": ["lr.too_low"], "evaluation.minority_counts": []},
    # a layer with equal weights is a fault of its own, whatever the loss
    {"loss.double_softmax!": ["init.loss"], "units.equal!": ["loop.no_gradient"]},
    {"architecture.no_norm": ["lr.nothing_learns!"]},
    {"architecture.no_residual": ["evaluation.underfits!"]},
    # what is drawn at random in evaluation comes before what is compared by it
    {"evaluation.nondeterministic": [], "lr.too_low": []},
    # of two causes, the first on the way from data to checkpoints
    {"data.no_signal": ["lr.nothing_learns!"], "architecture.no_norm": []},
    # that nothing can be learned does not put validation rows into training
    {"data.leakage!": [], "data.no_signal": ["lr.nothing_learns!"]},
    {"data.leakage!": ["checkpoints.selection!"]},
    {"data.scale": ["lr.too_low"], "loop.no_update": []},
    {"lr.too_low": [], "architecture.norm_after_add": ["stability.headroom"]},
    {"architecture.norm_after_add": ["stability.headroom"]},
    # of two roots, the one that fails
    {"loop.no_update!": [], "data.worker_rng": []},
    # a lr that is too high is one fault, whatever it does
    {"lr.too_high": ["stability.divergent!", "stability.early!", "clipping.masks_lr", "lr.at_edge"]},
    {"clipping.aggressive": ["lr.too_low"]},
    {"lr.nothing_learns!": ["stability.mid"]},
    # a remark is no cause, and stands before nothing of its severity, wherever it would stand on that way
    {"stability.spike": [], "architecture.no_norm": [], "checkpoints.best_not_last": [], "data.imbalance": [], "evaluation.too_small": []},
    {"lr.too_low": [], "clipping.cures": []},
    {"lr.too_low!": [], "data.imbalance": []},
    {"data.imbalance!": [], "lr.too_low": []},
    {"data.train_validation_shift": ["evaluation.generalisation_gap!"], "lr.too_low": []},
])  # fmt: skip
def test_the_cause_stands_first_and_what_follows_is_folded_under_it(expected: dict[str, list[str]]) -> None:
    """Causes in their order, each with what follows from it in its order; "code!" is one that fails."""
    alarms = [*expected, *itertools.chain(*expected.values())]
    tree = [(root.rstrip("!"), [code.rstrip("!") for code in follow]) for root, follow in expected.items()]
    for order in itertools.permutations(found(*alarms)):
        assert [(f.code, [g.code for g in follow]) for f, follow in listed(order)] == tree
        ranked = causes_first(order)
        assert [bool(f.follows_from) for f in ranked] == [False] * len(tree) + [True] * (len(alarms) - len(tree))
        assert [bool(f.advice) for f in ranked] == [not f.follows_from for f in ranked]


def test_nothing_is_lost_and_ranking_again_changes_nothing() -> None:
    findings = [*found("stability.early!", "data.scale", "lr.too_high"), *found("lr.best", "data.labels", status="ok"),
                *found("lr.unstable", status="not_measured")]  # fmt: skip
    ranked = causes_first(findings)
    assert [(f.code, f.status) for f in ranked] == [
        ("data.scale", "warn"), ("stability.early", "fail"), ("lr.too_high", "warn"), ("lr.best", "ok"),
        ("lr.unstable", "not_measured"), ("data.labels", "ok"),
    ]  # fmt: skip
    assert causes_first(ranked) == ranked
    assert {f.code for f in ranked if f.advice} == {"data.scale", "lr.unstable", "lr.best", "data.labels"}
    (_, then), *rest = listed(findings)
    assert [f.code for f in then] == ["stability.early", "lr.too_high"]
    assert all(not follow for _, follow in rest)


def test_every_alarm_stands_for_itself_or_under_one_that_does() -> None:
    for alarms in [*itertools.combinations(CODES, 2), CODES]:
        ranked = causes_first(found(*alarms))
        roots = {f.code for f in ranked if f.follows_from is None}
        assert ranked[0].code in roots
        assert {f.follows_from for f in ranked} <= roots | {None}


def test_an_alarm_on_data_loop_loss_or_model_stops_tuning_and_a_remark_does_not() -> None:
    assert vetoes_tuning(found("lr.too_low", "data.scale", "loop.no_update!")) == ("loop.no_update", "data.scale")
    assert vetoes_tuning(found("stability.early!", "lr.too_high", "data.imbalance", "architecture.no_norm")) == ()
    assert vetoes_tuning(found("loop.no_update", status="ok")) == ()
    assert vetoes_tuning(found("loop.retained_graph", "loop.conversion", "loss.floor")) == ()
    assert vetoes_tuning(found("loss.floor!", "loop.unowned_parameters")) == ("loss.floor", "loop.unowned_parameters")


def test_terminal_notebook_and_page_name_what_follows_under_its_cause() -> None:
    said = Diagnosis(findings=tuple(found("stability.early!", "lr.too_high", "data.worker_rng")), workload="mine")
    head, cause, follows, other, empty, *tries = repr(said).splitlines()
    assert head == "Diagnosis of mine  [fail]  2 warn; 1 more follows from these"
    assert "data.worker_rng" in cause
    assert "lr.too_high" in follows
    assert other.split() == ["From", "it", "follow:", "x", "stability.early"]
    rows = said.rows()["findings"]
    assert [(f["code"], f["follows_from"]) for f in rows][-1] == ("stability.early", "lr.too_high")
    html = verdict_table(said)
    assert html.index("<code>lr.too_high") < html.index("1 more follow from it") < html.index("<code>stability.early")
    assert "Mend stability.early" not in html
    assert [empty, *tries] == ["", "What to try next:", "1. Mend data.worker_rng.", "2. Mend lr.too_high."]
