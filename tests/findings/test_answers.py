"""The four questions, answered first: each in the words of the finding that matters, and each said once."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding, Status

KEPT: dict[str, Any] = {"adopted": False, "changed": [], "candidate": None, "reason": "Not adopted: nothing is better."}


def finding(code: str, status: Status = "ok", **given: Any) -> Finding:
    return Finding(code=code, status=status, summary=f"About {code}.", **given)


WELL = (
    finding("lr.best", value=0.1, evidence={"baseline_lr": 0.1, "low": 0.05, "high": 0.2}),
    finding("lr.too_low"), finding("lr.too_high"), finding("lr.unstable", value=0.5),
    finding("stability.headroom"), finding("stability.early"), finding("data.scale"), finding("loop.no_step"),
)  # fmt: skip


def answered(*other: Finding, found: dict[str, Any] | None = KEPT) -> dict[str, str]:
    codes = {f.code for f in other}
    made = Diagnosis(findings=(*other, *(f for f in WELL if f.code not in codes)), recommendation=found)
    return {answer.question: answer.text for answer in made.answers}


def test_a_healthy_training_is_told_where_it_stands() -> None:
    assert answered() == {
        "Learning rate": "About lr.best. About lr.unstable.",
        "Stability": "Your config trains stably. About stability.headroom.",
        "Anything broken": "Nothing found in 2 checks.",
        "Config": "Keep yours: nothing is better.",
    }


@pytest.mark.parametrize(("number", "said"), [(1, "1 more does not apply"), (3, "3 more do not apply")])
def test_what_does_not_apply_is_no_check_that_was_made(number: int, said: str) -> None:
    void = [
        Finding(code=f"loss.{n}", status="ok", summary="Does not apply: no attention was seen.") for n in range(number)
    ]
    assert answered(*void)["Anything broken"] == f"Nothing found in 2 checks; {said}."


@pytest.mark.parametrize(("zone", "said"), [("own", " About stability.spike."), ("other", "")])
def test_a_spike_of_the_own_config_that_costs_nothing_is_named_without_an_alarm(zone: str, said: str) -> None:
    seen = finding("stability.spike", evidence={"hits": [{"trial": 0, "zone": zone}]})
    assert answered(seen)["Stability"] == f"Your config trains stably.{said} About stability.headroom."
    made = Diagnosis(findings=(seen, *WELL), recommendation=KEPT)
    assert {answer.status for answer in made.answers} == {"ok"}


def test_a_study_that_seeks_no_config_has_no_answers() -> None:
    assert answered(found=None) == {}
    assert Diagnosis(findings=(finding("warmup.shortest"),), recommendation=KEPT).answers == ()


def test_an_alarm_takes_the_place_of_what_is_well() -> None:
    said = answered(finding("lr.too_high", "fail"), finding("data.scale", "warn"), finding("loop.no_step", "fail"))
    assert said["Anything broken"] == "loop.no_step: About loop.no_step. 1 more: data.scale."
    first = "Not decided: fix loop.no_step and data.scale first."
    assert said["Learning rate"] == f"{first} About lr.best. About lr.unstable.", "what follows is no answer"
    assert answered(finding("lr.too_high", "fail"))["Learning rate"] == "About lr.too_high. About lr.unstable."
    assert answered(finding("stability.early", "fail"))["Stability"] == "About stability.early."
    assert answered(finding("stability.early", "fail"), finding("lr.too_high", "fail"))["Stability"] == "Unstable; that follows from lr.too_high."  # fmt: skip


def test_an_own_lr_outside_of_what_trains_best_is_told_how_far_it_is() -> None:
    far = finding("lr.best", value=0.1, evidence={"baseline_lr": 0.01, "low": 0.05, "high": 0.2})
    assert answered(far)["Learning rate"] == "Keep 0.01. About lr.best. About lr.too_low. About lr.unstable."
    low, bottomless = finding("lr.too_low", "fail"), finding("loss.unbounded", "fail")
    made = Diagnosis(findings=(far, low, bottomless, *WELL[2:]), recommendation=KEPT)
    assert made.answers[0].text == "Not decided: fix loss.unbounded first. About lr.best. About lr.unstable."


def test_what_follows_is_folded_under_the_codes_that_it_follows_from() -> None:
    """An answer rests on measurements too, from which nothing follows."""
    made = Diagnosis(
        findings=(finding("lr.too_high", "fail"), finding("stability.early", "fail"), WELL[0], WELL[3]),
        recommendation=KEPT,
    )
    assert "From lr.too_high follow: x stability.early" in repr(made)


def test_remarks_and_what_follows_are_named_and_are_no_health() -> None:
    remark = finding("batch_size.noise_scale", "warn")
    assert answered(remark)["Anything broken"] == "Nothing found in 2 checks. Good to know: batch_size.noise_scale."
    said = answered(finding("lr.too_high", "fail"), finding("batch_norm.stale", "warn"))
    assert said["Anything broken"] == "Nothing found in 2 checks. batch_norm.stale: follows from lr.too_high."
    made = Diagnosis(findings=(remark, *WELL), recommendation=KEPT)
    assert [a.status for a in made.answers] == ["ok", "ok", "ok", "ok"], "what is good to know breaks nothing"
    grave = finding("batch_size.noise_scale", "fail")
    assert answered(grave)["Anything broken"] == "batch_size.noise_scale: About batch_size.noise_scale."
    cause = answered(finding("loop.retained_graph", "warn"), finding("loop.memory_creep", "fail"))
    assert cause["Anything broken"] == "loop.retained_graph: About loop.retained_graph.", (
        "what a failure follows from is no remark"
    )
    fault = Diagnosis(findings=(finding("loop.no_step", "fail"), *WELL[:-1]), recommendation=KEPT)
    assert fault.answers[-1].status == "not_measured", "a config that is not decided is no good news"
    assert fault.answers[0].status == "not_measured", "nor is a learning rate that was compared with the fault"
    assert fault.answers[0].text.startswith("Not decided: fix loop.no_step first. ")


def test_what_could_not_be_measured_is_never_well() -> None:
    silent = finding("stability.attention_logits")  # ok, as it does not apply: no word about stability
    said = answered(finding("data.scale", "not_measured"), finding("stability.early", "not_measured"), silent)
    assert said["Anything broken"] == "Nothing found in 1 check. 1 could not be made."
    assert said["Stability"] == "About stability.early."
    made = Diagnosis(findings=(finding("lr.best", "not_measured"),), recommendation=KEPT)
    assert [a.status for a in made.answers[:2]] == ["not_measured", "not_measured"]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"candidate": "lr 0.2"}, "Keep yours: lr 0.2 was not proven better."),
        ({"candidate": "lr 0.2", "promising": True, "refuted": "p = 0.4"}, "Keep yours: lr 0.2 was not proven better."),
        ({"candidate": "lr 0.2", "promising": True}, "Not proved: lr 0.2 looks better; it is not trained under fresh seeds yet."),
        (
            {
                "adopted": True, "changed": ["max_grad_norm", "peak_lr"], "own": {"peak_lr": 0.1, "max_grad_norm": None},
                "config": {"peak_lr": 0.2, "max_grad_norm": 1.0, "select": "validation/loss"}, "candidate": "lr 0.2",
                "baseline": {"validation/loss": 0.5}, "recommended": {"validation/loss": 0.25},
                "proof": {"seeds": [1, 2, 3], "arms": [{"chance": 0.01}]},
            },
            "Change max_grad_norm to 1; peak_lr 0.1 → 0.2: validation/loss 0.5 → 0.25, p = 0.01 over 3 fresh seeds.",
        ),
        (
            {
                "adopted": True, "changed": ["peak_lr"], "own": {"peak_lr": 0.1}, "candidate": "lr 0.2",
                "config": {"peak_lr": 0.2, "select": "loss"}, "baseline": {"loss": 0.5}, "recommended": {"loss": 0.25},
                "proof": {"seeds": [1, 2], "planned": 3, "test": "one-sided paired t", "arms": [{"chance": 0.004}]},
            },
            "Change peak_lr 0.1 → 0.2: loss 0.5 → 0.25, p = 0.004 (one-sided paired t) over 2 fresh seeds of 3 planned.",
        ),
        (
            {
                "adopted": True, "changed": ["peak_lr"], "own": {"peak_lr": 0.1}, "candidate": "lr 0.2",
                "config": {"peak_lr": 0.2, "select": "loss"}, "baseline": {"loss": 0.5}, "recommended": {"loss": 0.25},
            },
            "Try peak_lr 0.1 → 0.2, not proven: loss 0.5 → 0.25, one seed.",
        ),
    ],
)  # fmt: skip
def test_the_config_is_kept_or_changed_with_what_that_brings(found: dict[str, Any], text: str) -> None:
    assert answered(found=KEPT | found)["Config"] == text
    assert answered(finding("loop.no_step", "fail"), found=KEPT | found)["Config"].startswith(
        "First fix loop.no_step." if found.get("adopted") else "Not decided: fix loop.no_step first."
    )
    for status in ("warn", "fail"):  # compared by rows that were trained on
        said = answered(finding("data.leakage", status), found=KEPT | found)["Config"]
        assert ("fix data.leakage" in said) == (status == "fail")


def test_a_reason_that_an_answer_gives_is_not_given_again() -> None:
    """Nor is another reason left out."""
    why = "Not measured: nothing was trained."
    missing = [Finding(code=c, status="not_measured", summary=why) for c in ("lr.best", "lr.unstable", "lr.too_low")]
    other = Finding(code="loss.floor", status="not_measured", summary="Not measured: no loss was seen.")
    text = repr(Diagnosis(findings=(*missing, other, WELL[-1]), recommendation=KEPT, workload="mine"))
    assert " ".join(text.split()).count("nothing was trained") == 1
    assert "no loss was seen" in text
    assert "2 more not measured for the reason above: lr.unstable, lr.too_low" in " ".join(text.split())


def test_terminal_and_notebook_say_everything_once() -> None:
    wrong = (finding("lr.too_high", "fail"), *(f for f in WELL if f.code != "lr.too_high"))
    more = tuple(finding(f"input.x{k}") for k in range(9))
    made = Diagnosis(findings=(*wrong, *more), recommendation=KEPT, workload="mine")
    for code in ("lr.too_high", "lr.unstable", "stability.headroom"):
        assert repr(made).count(f"About {code}.") == 1
    page = made._repr_mimebundle_()["text/html"]
    assert page.count("About lr.too_high.") == 1
    assert page.index("About lr.too_high.") < page.index("Config") < page.index("<details>")
    assert repr(made).splitlines()[1].split()[:3] == ["x", "Learning", "rate"]
