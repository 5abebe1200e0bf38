"""Weighting and coverage, judged on cases made by hand: every fault by its exact bias, the healthy twin in peace (P2.11)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.topics.evaluation.diagnose import diagnose_evaluation_cases, predicted_values

VALUES = np.linspace(5.0, 1.0, 7)


def batches_of(size: int, count: int = 7) -> list[list[int]]:
    return [list(range(i, min(i + size, count))) for i in range(0, count, size)]


def facts(*cases: tuple[int, float | None, list[list[int]]], values: Any = VALUES, **more: Any) -> dict[str, Any]:
    return {
        "metric": "loss", "values": list(values), "weights": [1.0] * len(values), "batch_dependence": 0.0,
        "observed_batches": True,
        "cases": [{"batch_size": b, "hosts": 1, "observed": o, "batches": s, "error": None} for b, o, s in cases],
    } | more  # fmt: skip


def statuses(given: dict[str, Any]) -> tuple[str, str]:
    found = diagnose_evaluation_cases(given)
    return found["evaluation.weighting"].status, found["evaluation.coverage"].status


def test_an_exact_mean_is_left_alone() -> None:
    assert statuses(facts(*((b, VALUES.mean(), batches_of(b)) for b in (1, 3, 7, 9)))) == ("ok", "ok")


def test_mean_of_batch_means_has_the_exact_bias() -> None:
    """sum_b m_b / K - sum_b n_b m_b / N."""
    wrong = np.mean([VALUES[:3].mean(), VALUES[3:6].mean(), VALUES[6]])
    found = diagnose_evaluation_cases(facts((3, wrong, batches_of(3))))["evaluation.weighting"]
    (case,) = found.evidence["cases"]
    assert (found.status, case["fault"]) == ("fail", "mean of batch means")
    assert case["predicted_bias"] == pytest.approx(wrong - VALUES.mean())
    assert found.value == pytest.approx(abs(wrong - VALUES.mean()))
    assert statuses(facts((3, wrong, batches_of(3)))) == ("fail", "ok")


def test_dropped_and_repeated_examples_are_told_apart() -> None:
    dropped = facts((3, VALUES[:6].mean(), batches_of(3)[:2]))
    repeated = facts((4, VALUES[[*range(7), 0]].mean(), [[0, 2, 4, 6], [1, 3, 5, 0]]))
    for given, counts, said in ((dropped, (1, 0), "never evaluated"), (repeated, (0, 1), "counted twice")):
        assert statuses(given) == ("ok", "fail")
        found = diagnose_evaluation_cases(given)["evaluation.coverage"]
        (case,) = found.evidence["cases"]
        assert (case["dropped"], case["repeated"]) == counts
        assert said in found.summary
        assert case["predicted_bias"] == pytest.approx(case["bias"])


def test_copies_that_fill_up_a_batch_are_padding() -> None:
    seen = [[0, 1, 2], [3, 4, 5], [6, 6, 6]]
    found = diagnose_evaluation_cases(facts((3, VALUES[[*range(7), 6, 6]].mean(), seen)))
    assert found["evaluation.weighting"].evidence["cases"][0]["fault"] == "counted padding"
    assert found["evaluation.weighting"].status == "fail"
    assert found["evaluation.coverage"].status == "ok"


def test_rows_that_are_no_examples_are_padding_whose_value_one_case_tells_the_other() -> None:
    pad = 0.7
    one = (VALUES.sum() + 2 * pad) / 9, [[0, 1, 2], [3, 4, 5], [6, -1, -1]]
    other = (VALUES.sum() + 3 * pad) / 10, [[*range(5)], [5, 6, -1, -1, -1]]
    found = diagnose_evaluation_cases(facts((3, *one), (5, *other)))["evaluation.weighting"]
    assert found.status == "fail"
    for case in found.evidence["cases"]:
        assert case["fault"] == "counted padding"
        assert case["predicted_bias"] == pytest.approx(case["bias"], rel=1e-9)


def test_a_second_look_at_every_example_is_no_padding() -> None:
    """As many unknown rows as examples, at every batch size: one number for them would explain any value."""
    cases = [(b, VALUES.mean() + 0.4, [row + [-1] * len(row) for row in batches_of(b)]) for b in (2, 3, 7)]
    found = diagnose_evaluation_cases(facts(*cases))
    assert found["evaluation.weighting"].status == "fail"
    assert {c["fault"] for c in found["evaluation.weighting"].evidence["cases"]} == {"unexplained"}
    assert found["evaluation.coverage"].status == "ok"


def test_padding_that_weighs_nothing_is_healthy() -> None:
    assert statuses(facts((3, VALUES.mean(), [[0, 1, 2], [3, 4, 5], [6, -1, -1]]))) == ("ok", "ok")


def test_weights_that_are_ignored_are_named() -> None:
    weights = np.arange(1.0, 8.0)
    given = facts((7, VALUES.mean(), batches_of(7)), weights=list(weights))
    found = diagnose_evaluation_cases(given)["evaluation.weighting"]
    assert found.evidence["cases"][0]["fault"] == "weights ignored"
    assert found.evidence["cases"][0]["expected"] == pytest.approx(np.average(VALUES, weights=weights))


def test_what_no_fault_explains_is_a_fault_all_the_same() -> None:
    found = diagnose_evaluation_cases(facts((3, 2.345, batches_of(3))))["evaluation.weighting"]
    assert (found.status, found.evidence["cases"][0]["fault"]) == ("fail", "unexplained")
    assert "predicts" not in found.summary


def test_values_that_depend_on_the_batch_are_named_first() -> None:
    spread = float(np.ptp(VALUES))
    for share, status in ((0.3, "fail"), (0.02, "fail"), (0.005, "ok")):
        given = facts((3, VALUES.mean(), batches_of(3)), batch_dependence=share * spread)
        found = diagnose_evaluation_cases(given)["evaluation.weighting"]
        assert (found.status, found.value) == (status, share * spread)


@pytest.mark.parametrize("values", [[1.0] * 7, [0.0] * 7])
def test_equal_values_hide_the_weights(values: list[float]) -> None:
    assert statuses(facts((3, values[0], batches_of(3)), values=values)) == ("not_measured", "ok")


def test_a_loader_without_a_full_batch_evaluates_nothing() -> None:
    given = facts((9, None, []), (3, VALUES.mean(), batches_of(3)))
    assert statuses(given) == ("ok", "fail")


def test_nobody_looked_and_nobody_saw() -> None:
    assert [f.status for f in diagnose_evaluation_cases({})] == ["not_measured"] * 2
    assert statuses(facts((3, VALUES.mean(), []), observed_batches=False))[1] == "not_measured"


def unknown(observed: float, *batches: list[int]) -> dict[str, Any]:
    given = facts((3, observed, list(batches)))
    given["cases"][0]["by_order"] = True
    return given


def test_inputs_in_another_form_count_where_the_value_says_so() -> None:
    """Two rows were not recognised; the mean is exact, so they are the two examples that are not among the others."""
    given = facts((3, VALUES.mean(), [[0, 1, -1], [3, 4, -1], [6]]))
    assert statuses(given) == ("ok", "ok")
    (case,) = diagnose_evaluation_cases(given)["evaluation.coverage"].evidence["cases"]
    assert (case["dropped"], case["padding"]) == (0, 0)
    assert statuses(facts((3, VALUES.mean(), [[0, 1, 2], [3, 4, 5], [-1, -1, -1]]))) == ("ok", "ok")
    assert statuses(facts((3, VALUES[1:6].mean(), [[1, 2, 3], [4, 5, -1]]), values=VALUES)) == ("ok", "fail"), (
        "more are missing than there were unknown rows"
    )


def test_an_unknown_form_and_an_unknown_value_leave_coverage_open() -> None:
    assert statuses(unknown(9.9, [0, 1, 2], [3, 4, 5], [6])) == ("fail", "not_measured")
    assert statuses(facts((3, 9.9, [[0, 1, -1], [3, 4, -1], [6]]))) == ("fail", "not_measured")
    assert statuses(unknown(VALUES[:6].mean(), [0, 1, 2], [3, 4, 5])) == ("ok", "fail")


def test_every_prediction_is_the_arithmetic_of_its_fault() -> None:
    found = predicted_values(np.array([1.0, 2.0, 6.0]), np.array([1.0, 1.0, 2.0]), [[0, 1], [2, -1]])
    assert found == pytest.approx(
        {
            "exact": 15 / 4,
            "rows seen": 15 / 4,
            "mean of batch means": (1.5 + 6) / 2,
            "weights ignored": 3.0,
            "counted padding": 9 / 4,
        }
    )
