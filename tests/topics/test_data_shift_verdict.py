"""Where a difference between the splits becomes an alarm: facts by hand, on either side of each limit."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from workbench.findings.finding import Finding
from workbench.topics.data.diagnose import diagnose_data
from workbench.topics.data.diagnose_shift import label_shift, train_validation_shift
from workbench.topics.evaluation.diagnose_generalisation import Gap

_USED = inspect.signature(diagnose_data).parameters
LIMITS = {
    name: _USED[of].default for name, of in (("alpha", "alpha"), ("small", "small_shift"), ("large", "large_shift"))
}
TABLE = {"reason": "there are no columns"}


def gap(share: float, z: float = 9.0, **scores: Any) -> Gap:
    known: dict[str, Any] = {"train_score": None, "score": None, "renumbered": None, "examples": 400} | scores
    return Gap(share=share, z=z, train=0.1, validation=0.1 + share, **known)


def classes(distance: float, *, unseen: float = 0.0, lacking: float = 0.0) -> dict[str, Any]:
    missing = {"train": {"share": unseen, "classes": [3]}, "other": {"share": lacking, "classes": [5]}}
    return {"kind": "classes", "distance": distance, "p": 1e-9, "missing": missing, "rows": (400, 100), "counts": {}}


def numbers(distance: float, *, tested: bool = True, rows: tuple[int, int] = (400, 100)) -> dict[str, Any]:
    """One feature; where not `tested`, dependence between rows leaves its distance to `farthest` alone."""
    feature = {"name": "feature 0", "distance": distance, "p": 1e-9, "p_rows": 1e-9, "train": [0.0, 1.0], "other": [3.0, 1.0]}  # fmt: skip
    return {"kind": "numbers", "tests": 1, "worst": [feature] if tested else [], "farthest": feature, "rows": rows}


def of(targets: dict[str, Any], inputs: dict[str, Any] = TABLE, **facts: Any) -> dict[str, Any]:
    return {"shift": {"validation": {"targets": targets, "inputs": inputs}}, **facts}


def labels(facts: dict[str, Any], trained: Gap | None = None) -> Finding:
    return label_shift(facts, trained, **LIMITS)


def inputs(facts: dict[str, Any], trained: Gap | None = None) -> Finding:
    return train_validation_shift(facts, trained, **LIMITS)


HARMFUL, UNSURE, SMALL = gap(0.4), gap(0.4, z=2.0), gap(0.05)


@pytest.mark.parametrize(
    ("distance", "trained", "status"),
    [
        (0.14, HARMFUL, "ok"), (0.16, HARMFUL, "warn"), (0.16, UNSURE, "ok"), (0.16, SMALL, "ok"),
        (0.29, None, "ok"), (0.29, HARMFUL, "warn"), (0.29, UNSURE, "ok"),
        (0.3, None, "warn"), (0.3, HARMFUL, "fail"), (0.3, UNSURE, "warn"), (0.3, SMALL, "ok"),
    ],
)  # fmt: skip
def test_what_a_trained_model_lost_decides_on_other_shares_of_the_classes_and_on_other_inputs(
    distance: float, trained: Gap | None, status: str
) -> None:
    found = labels(of(classes(distance)), trained)
    assert (found.status, bool(found.advice)) == (status, status != "ok"), found
    assert ("by 2.0 standard errors" in found.summary) is (trained is UNSURE and status == "warn")
    assert inputs(of(classes(0.0), numbers(distance)), trained).status == status
    assert labels(of(numbers(distance)), trained).status == status


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"unseen": 0.04}, None), ({"unseen": 0.06}, "training has none of class 3, which 6% of validation are of"),
        ({"lacking": 0.24}, None), ({"lacking": 0.26}, "validation has none of class 5, which 26% of training are of"),
    ],
)  # fmt: skip
def test_a_class_of_a_part_of_one_split_that_the_other_lacks(missing: dict[str, float], said: str | None) -> None:
    for trained in (None, SMALL):
        found = labels(of(classes(max(missing.values()), **missing)), trained)
        assert found.status == ("fail" if said else "ok"), found
        assert (said or "The shares of classes differ") in found.summary


@pytest.mark.parametrize(
    ("ours", "theirs", "status"), [(100, 9, "warn"), (100, 10, "ok"), (79, 2, "ok"), (80, 2, "warn")]
)
def test_a_class_with_too_few_validation_examples_is_named(ours: int, theirs: int, status: str) -> None:
    found = labels(of(classes(0.2) | {"counts": {"0": [400 - ours, 100 - theirs], "1": [ours, theirs]}}), SMALL)
    assert found.status == status
    assert (f"validation has {theirs} examples of class 1, where" in found.summary) is (status == "warn")


@pytest.mark.parametrize(("distance", "status"), [(0.5, "warn"), (0.79, "warn"), (0.81, "fail")])
def test_only_next_to_nothing_in_common_fails_where_nothing_was_trained(distance: float, status: str) -> None:
    for rows in ((400, 20), (400, 19)):  # that depend on each other
        dependent = inputs(of(classes(0.0), numbers(distance, tested=False, rows=rows))).status
        assert dependent == ("fail" if status == "fail" and rows[1] == 20 else "ok")
    assert inputs(of(classes(0.0), numbers(distance))).status == status
    assert labels(of(numbers(distance))).status == status


@pytest.mark.parametrize(
    ("trained", "score", "anew", "rows", "status"),
    [
        (0.6, 0.1, 0.59, 400, "ok"), (0.6, 0.1, 0.61, 400, "fail"), (0.9, 0.41, 0.8, 400, "ok"), (0.9, 0.39, 0.8, 400, "fail"),
        (0.9, 0.1, 0.75, 400, "ok"), (0.9, 0.1, 0.78, 20, "fail"), (0.9, 0.1, 0.9, 19, "ok"),  # 0.765 is 0.85 of training's
    ],
)  # fmt: skip
def test_classes_are_numbered_anew_where_that_is_right_far_more_often(
    trained: float, score: float, anew: float, rows: int, status: str
) -> None:
    """What a simple model shows, and what a trained one does."""
    carried = {"score": score, "renumbered": anew, "rows": rows}
    simple = {"carried": carried, "score": {"linear": trained}, "own": None}
    shown = [labels(of(classes(0.0), yardsticks=simple))]
    shown += [labels(of(classes(0.0)), gap(0.05, train_score=trained, score=score, renumbered=anew, examples=rows))]
    for found in shown:
        assert found.status == status, found
        assert (f"{score:.0%} of the predictions are right as they are, {anew:.0%}" in found.summary) is (
            status == "fail"
        )


def yardsticks(*, carried: float = 0.3, own_z: float = 8.0, own_rows: int = 200, z: float = 20.0) -> dict[str, Any]:
    """A simple model that is right in 0.9 of training, give or take 0.015 on 400 rows."""
    own = {"z": {"linear": own_z}, "rows": own_rows, "score": {"linear": 0.8}}
    carries = {"score": carried, "renumbered": carried, "rows": 400}
    return {"classes": 10, "score": {"linear": 0.9}, "z": {"linear": z}, "carried": carries, "own": own}


@pytest.mark.parametrize(("carried", "wrong"), [(-0.44, False), (-0.46, True)])
def test_the_wrong_sign_is_half_of_the_correlation_within_training(carried: float, wrong: bool) -> None:
    found = labels(of(numbers(0.0), yardsticks=yardsticks(carried=carried) | {"classes": None}))
    assert (found.status == "fail", "wrong sign" in found.summary) == (wrong, wrong)


@pytest.mark.parametrize(
    ("known", "trained", "wrong"),
    [
        ({}, gap(0.49), None), ({}, gap(0.5), "inputs"), ({"own_z": 5.9}, None, None), ({"own_z": 6.0}, None, "inputs"),
        ({"own_z": 3.0}, None, None), ({"own_z": 2.9}, None, "targets"), ({"own_z": 0.0, "own_rows": 99}, None, None),
        ({"z": 9.9}, None, None), ({"z": 10.0}, None, "inputs"), ({"carried": 0.82}, None, None), ({"carried": 0.8}, None, "inputs"),
        ({"copies": 49}, None, "inputs"), ({"copies": 50}, None, None),
    ],
)  # fmt: skip
def test_what_training_teaches_has_to_hold_on_validation(
    known: dict[str, Any], trained: Gap | None, wrong: str | None
) -> None:
    overlap = {"train_rows": 100, "train_duplicates": known.get("copies", 0)}
    sticks = yardsticks(**{name: value for name, value in known.items() if name != "copies"})
    facts = of(classes(0.0), yardsticks=sticks, overlap=overlap)
    assert (labels(facts, trained).status == "fail") is (wrong == "targets")
    assert (inputs(facts, trained).status == "fail") is (wrong == "inputs")
