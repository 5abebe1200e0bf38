"""Advice that fits: no gain of what repeats examples, of what cannot be stored, of what was tried in vain; no cause of little."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diagnostics.test_input_pipeline import said
from tests.helpers.simulated_input import pipeline
from workbench.topics.input.model import find_cause, predictions

COUNTED = {"workers": 2, "without": 40, "with_workers": 40, "alike": 0, "same": True, "same_contents": True}
ALIKE = {"workers": 2, "without": None, "with_workers": None, "alike": 3, "same": False, "same_contents": False}


def with_loader(facts: dict[str, Any], **settings: Any) -> dict[str, Any]:
    facts["loader"].update(settings)
    return facts


def changes(facts: dict[str, Any]) -> set[tuple[str, Any]]:
    return {(p.change, p.value) for p in predictions(facts)}


def advice(facts: dict[str, Any]) -> str:
    finding = said(facts)["input.bound"]
    assert finding.status == "warn"
    return "\n".join(finding.advice)


def test_of_a_stream_that_was_not_counted_no_gain_of_workers_is_said() -> None:
    facts = with_loader(pipeline(epochs=None), stream=True)
    assert changes(facts) == {("workers", 1)}, "neither more workers, nor items that have no index stored"
    assert "get_worker_info" in advice(facts).splitlines()[0]
    assert "could not be counted" in advice(facts)
    assert "cache_dataset" not in advice(facts)
    count = said(with_loader(pipeline(epochs=None, variants=[]), stream=True))["input.example_count"]
    assert count.status == "not_measured"
    assert "get_worker_info" in count.advice[0]


def test_of_a_stream_that_is_shared_out_workers_are_tried() -> None:
    facts = with_loader(pipeline(epochs=COUNTED), stream=True)
    assert changes(facts) == {("workers", 1), ("workers", 2), ("workers", 4)}
    assert "get_worker_info" not in advice(facts)


def test_workers_that_begin_alike_repeat_each_other() -> None:
    facts = with_loader(pipeline(epochs=ALIKE, workers=2, variants=[]), stream=True)
    count = said(facts)["input.example_count"]
    assert (count.status, count.value) == ("warn", 2.0)
    assert "2 workers begin with the same 3 batches each" in count.summary
    alone = with_loader(pipeline(epochs=ALIKE, variants=[]), stream=True)
    assert said(alone)["input.example_count"].status == "ok", "without workers nothing is repeated"
    assert "is not shared out so far" in advice(with_loader(pipeline(epochs=ALIKE), stream=True))


def test_items_that_are_drawn_anew_cannot_be_stored() -> None:
    heavy = pipeline(blocked=0.1, items_repeat=False)
    assert ("cache", "items") not in changes(heavy)
    assert "cache_dataset" not in advice(heavy)
    assert "Items differ from one reading to the next" in advice(heavy)
    same = pipeline(blocked=0.1, items_repeat=True)
    assert ("cache", "items") in changes(same)
    assert "cache_dataset" in advice(same)


def tried(change: str, value: Any, after_s: float) -> dict[str, Any]:
    return {"change": change, "value": value, "predicted_s": 0.01, "before_s": 0.04, "after_s": after_s}


def test_what_was_tried_and_does_not_help_is_no_advice_and_what_helps_comes_first() -> None:
    vain = pipeline(blocked=0.1, fix=tried("cache", "items", 0.04))
    assert "cache_dataset" not in advice(vain)
    assert "worker processes" in advice(vain)
    assert "cache_dataset" in advice(pipeline(blocked=0.1, fix=tried("cache", "items", 0.01))).splitlines()[0]
    spread = pipeline(blocked=0.1, fix=tried("workers", 4, 0.01))
    assert "worker processes" in advice(spread).splitlines()[0]
    none = pipeline(workers=1, fix=tried("workers", 4, 0.04))
    assert "what was tried did not help" in advice(none)


@pytest.mark.parametrize(("collate", "words"), [("default", "__getitems__"), ("pad_all", "Look into pad_all")])
def test_advice_on_collating_fits_the_collate_function(collate: str, words: str) -> None:
    text = advice(with_loader(pipeline(collate=0.9), collate=collate))
    assert words in text
    assert ("stack arrays" in text) == (collate != "default")


def test_what_explains_under_half_of_the_wait_is_no_cause() -> None:
    facts = pipeline(fetch_s=0.03)
    facts["fetch"].update(items_s=0.01, items_blocked_s=0.01)
    found = find_cause(facts)
    assert (found.name, found.fix) == ("unknown", None)
    assert "making a batch is only 10 ms of it" in said(facts)["input.bound"].summary
    assert "sampler" in advice(facts)
    facts["fetch"].update(items_s=0.02, items_blocked_s=0.02)
    assert find_cause(facts).name == "latency"


def test_three_parts_that_are_each_under_half_are_all_named() -> None:
    facts = pipeline(fetch_s=0.03, collate=0.4, blocked=0.5)
    found = find_cause(facts)
    assert found.name == "mixed"
    assert found.fix is not None
    assert found.fix.change == "workers"
    assert "latency 9 ms, preprocessing 9 ms, collate 12 ms" in said(facts)["input.bound"].summary


def test_a_wait_under_a_millisecond_is_no_alarm() -> None:
    facts = pipeline(fetch_s=0.0009, compute_s=0.004)
    finding = said(facts)["input.bound"]
    assert (finding.status, finding.value) == ("ok", pytest.approx(0.9 / 4.9))
    assert said(pipeline(fetch_s=0.0011, compute_s=0.004))["input.bound"].status == "warn"


def test_hardly_anything_hidden_is_not_spoken_of() -> None:
    facts = pipeline(fetch_s=0.002, compute_s=0.02, workers=2)
    assert "hidden behind" in said(facts)["input.bound"].summary
    for one in facts["rounds"]:
        one.update(steady_s=0.0219, wait_s=0.0019)
    assert said(facts)["input.bound"].status == "ok"
    assert "hidden" not in said(facts)["input.bound"].summary


def test_a_small_batch_is_not_made_smaller() -> None:
    facts = pipeline(fetch_s=0.002, compute_s=0.02, workers=2)
    for one in facts["rounds"]:
        one.update(steady_s=0.03, wait_s=0.01)
    assert "Hand over less" not in advice(facts), "576 bytes"
    facts["batch_bytes"] = {"x": 10**6}
    assert "Hand over less" in advice(facts)


def test_time_that_other_programs_took_from_collating_is_no_collating() -> None:
    facts = pipeline(fetch_s=0.03, collate=0.9)
    assert find_cause(facts).parts["collate"] == pytest.approx(0.027)
    facts["fetch"]["collate_queued_s"] = 0.012
    assert find_cause(facts).parts["collate"] == pytest.approx(0.015)
