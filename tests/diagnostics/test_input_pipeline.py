"""The model of loading beside computing against a loader that is played batch by batch; each cause, and each verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.simulated_input import pipeline, played
from workbench.record.json_values import dumps
from workbench.topics.input.diagnose import CODES, diagnose_input_pipeline
from workbench.topics.input.model import CAUSES, find_cause, fix_speedups, knee, loop_period, predictions, step_time


@dataclass
class Looked:
    facts: dict[str, Any]
    workload: str = "w"
    command: str | None = None
    path: Path | None = None


def said(facts: dict[str, Any], **thresholds: float) -> Any:
    diagnosis = diagnose_input_pipeline(Looked({"input_pipeline": facts}), **thresholds)
    assert [f.code for f in diagnosis] == list(CODES)
    dumps(diagnosis.to_dict())
    for finding in diagnosis:
        assert finding.clause
        assert finding.advice or finding.status not in ("warn", "fail")
    return diagnosis


@pytest.mark.parametrize("compute_s", [0.0, 0.004, 0.02])
@pytest.mark.parametrize("fetch_s", [0.001, 0.012, 0.05])
def test_predicted_steps_are_those_of_the_played_loader(fetch_s: float, compute_s: float) -> None:
    facts = pipeline(fetch_s=fetch_s, compute_s=compute_s, tried=(1, 2, 4, 8), batches=10**9)
    found = {p.value: p.period_s for p in predictions(facts) if p.change == "workers"}
    assert set(found) == {1, 2, 4, 8}
    for workers, period in found.items():
        assert period == pytest.approx(played(fetch_s, compute_s, workers), rel=0.01)


def test_the_step_is_split_into_waiting_hidden_and_computing() -> None:
    alone = step_time(pipeline(fetch_s=0.03, compute_s=0.01))
    assert (alone.period_s, alone.wait_s, alone.compute_s) == pytest.approx((0.04, 0.03, 0.01))
    assert (alone.hidden_s, alone.restart_s) == (0, 0)
    assert alone.wait_share == pytest.approx(0.75)
    beside = step_time(pipeline(fetch_s=0.03, compute_s=0.02, workers=2, start_s=0.03, batches=10**9))
    assert beside.wait_s == pytest.approx(0, abs=1e-9)
    assert beside.hidden_s == pytest.approx(0.03)


def test_a_busy_machine_changes_no_share() -> None:
    """Other programs have the processors for half of the time: both parts take twice as long, and their shares stay."""
    facts = pipeline(fetch_s=0.03, compute_s=0.01)
    quiet = said(facts)["input.bound"]
    for one in facts["rounds"]:
        one.update(steady_s=0.08, wait_s=0.03, queued_s=0.04)
    busy = said(facts)["input.bound"]
    assert busy.value == pytest.approx(quiet.value) == pytest.approx(0.75)
    assert "75% of a step waits for data (30 ms of 40 ms, what other programs took left out)" in busy.summary


def test_starting_an_epoch_is_shared_out_over_its_batches() -> None:
    rounds = [{"steady_s": 0.01, "wait_s": 0.0, "step_s": 0.01, "starts": [9.0, 0.5]}, {"steady_s": 0.01, "wait_s": 0.0, "step_s": 0.01, "starts": [0.5]}]  # fmt: skip
    period, wait, start = loop_period(rounds, 10)
    assert (period, wait, start) == pytest.approx((0.06, 0.05, 0.5)), "the very first start is left out"
    assert loop_period(rounds, None)[0] == pytest.approx(0.01)


def test_epochs_of_one_batch_are_all_start() -> None:
    rounds = [{"steady_s": math.nan, "wait_s": math.nan, "step_s": 0.01, "starts": [0.2, 0.1]}]
    assert loop_period(rounds, 1) == pytest.approx((0.11, 0.1, 0.1))


def test_processors_bound_what_workers_can_do() -> None:
    facts = pipeline(fetch_s=0.04, compute_s=0.01, cores=2, batches=10**9)
    for row in facts["variants"]:
        row["cpu_s"] = 0.04
    found = {p.value: p.period_s for p in predictions(facts) if p.change == "workers"}
    assert found[4] == pytest.approx(0.02)


def test_an_empty_table_has_no_knee_and_a_flat_one_its_first_row() -> None:
    assert knee([]) is None
    rows = [{"workers": k, "batch_s": s} for k, s in ((1, 0.04), (2, 0.02), (4, 0.0105), (8, 0.01))]
    assert knee(rows) == 4
    assert knee([{"workers": 1, "batch_s": 0.01}, {"workers": 2, "batch_s": 0.0101}]) == 1


DROP = {"change": "drop", "value": ["extra"], "dropped": ["extra"], "workers": 0, "batch_s": 0.002, "handoff_s": 0.0,
        "cpu_s": 0.0, "items_s": 0.001, "collate_s": 0.001}  # fmt: skip
SYNC = {"steps": 20, "share": 1.0, "per_step": 1.0, "places": {"train.py:3 step": 1.0}, "how": "calls"}


def planted(cause: str) -> dict[str, Any]:
    if cause == "latency":
        return pipeline()
    if cause == "preprocessing":
        return pipeline(blocked=0.1)
    if cause == "collate":
        return pipeline(collate=0.9)
    if cause == "worker_restart":
        return pipeline(fetch_s=0.01, workers=2, start_s=0.3, batches=5)
    if cause == "too_few_workers":
        return pipeline(workers=1, tried=(1, 2, 4))
    if cause == "hand_over":
        facts = pipeline(fetch_s=0.002, compute_s=0.02, workers=2)
        for one in facts["rounds"]:
            one.update(steady_s=0.03, wait_s=0.01)
        return facts
    if cause == "unused_features":
        facts = pipeline(collate=0.9)
        facts["variants"].append(DROP)
        return facts
    return pipeline(fetch_s=0.009, ahead=True, syncs=SYNC)


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_found(cause: str) -> None:
    facts = planted(cause)
    found = find_cause(facts)
    assert found.name == cause
    if cause != "hand_over":  # nothing that was tried answers it
        assert found.fix is not None
        assert found.fix.period_s < step_time(facts).period_s
    finding = said(facts)["input.bound"]
    assert (finding.status, finding.evidence["cause"]) == ("warn", cause)


def test_latency_that_no_number_of_workers_hides_stays_latency() -> None:
    assert find_cause(pipeline(fetch_s=1.0, workers=1, tried=(1, 2, 4))).name == "latency"


@pytest.mark.parametrize("workers", [4, 8])
def test_hidden_loading_is_healthy(workers: int) -> None:
    finding = said(pipeline(fetch_s=0.03, compute_s=0.02, workers=workers, batches=1000))["input.bound"]
    assert finding.status == "ok"
    assert "hidden behind" in finding.summary


def test_a_slow_first_batch_is_healthy() -> None:
    facts = pipeline(fetch_s=0.0005, compute_s=0.02, cold_s=3.0)
    facts["rounds"][0]["starts"][0] = 3.0
    assert said(facts)["input.bound"].status == "ok"


def test_a_wait_that_the_interpreter_alone_takes_is_no_alarm() -> None:
    facts = pipeline(fetch_s=0.0002, compute_s=0.0002)
    assert said(facts)["input.bound"].status == "ok"
    assert said(facts, least_wait_s=1e-5)["input.bound"].status == "warn"


@pytest.mark.parametrize(
    ("fetch_s", "status", "word"), [(0.0009, "ok", "8%"), (0.0015, "warn", "Some"), (0.004, "warn", "Much")]
)
def test_the_shares_at_which_it_speaks(fetch_s: float, status: str, word: str) -> None:
    finding = said(pipeline(fetch_s=fetch_s, compute_s=0.01))["input.bound"]
    assert finding.status == status
    assert finding.summary.startswith(word)
    assert finding.value == pytest.approx(fetch_s / (fetch_s + 0.01))


def test_the_gain_of_what_was_tried_is_said_and_kept() -> None:
    fix = {"change": "workers", "value": 4, "predicted_s": 0.010, "before_s": 0.040, "after_s": 0.0125}
    facts = pipeline(fix=fix)
    found = fix_speedups(facts)
    assert found is not None
    assert (found["predicted"], found["measured"]) == pytest.approx((4, 3.2))
    assert math.isnan(found["predicted_low"])
    finding = said(facts)["input.bound"]
    assert "With num_workers=4 it is 3.2 times as fast (predicted: 4)." in finding.summary
    assert finding.evidence["fix"]["measured"] == pytest.approx(3.2)


def test_rounds_that_disagree_are_an_interval() -> None:
    rounds = [
        {"before_s": 0.040, "predicted_s": [0.010, 0.008], "after_s": 0.020},
        {"before_s": 0.042, "predicted_s": [0.014, None], "after_s": 0.007},
    ]
    fix = {"change": "workers", "value": 4, "predicted_s": 0.010, "before_s": 0.040, "after_s": 0.0125}
    found = fix_speedups(pipeline(fix=fix | {"rounds": rounds}))
    assert found is not None
    assert (found["predicted_low"], found["predicted_high"]) == pytest.approx((3, 5))
    assert (found["measured_low"], found["measured_high"]) == pytest.approx((2, 6))
    summary = said(pipeline(fix=fix | {"rounds": rounds}))["input.bound"].summary
    assert "it is 3.2 [2 to 6] times as fast (predicted: 4 [3 to 5])." in summary
    assert fix_speedups(pipeline(fix=fix | {"after_s": None})) is not None, "a null in JSON"


def waiting_for_ready(
    *, wait_s: float = 0.006, queued: float = 0.0, cpu: float = 0.01, **changes: Any
) -> dict[str, Any]:
    """Two workers have batches ready in 2 ms, which are waited for all the same."""
    facts = pipeline(fetch_s=0.002, compute_s=0.02, workers=2, **changes)
    for one in facts["rounds"]:
        one.update(steady_s=0.02 + wait_s, wait_s=wait_s, cached_cpu_s=cpu, cached_queued_s=queued)
    return facts


def tried_without(after_s: float) -> dict[str, Any]:
    rounds = [{"before_s": 0.026, "predicted_s": [0.022, 0.022], "after_s": after_s}] * 3
    return {"change": "in_process", "value": 0, "predicted_s": 0.022, "before_s": 0.026, "after_s": after_s, "rounds": rounds}  # fmt: skip


def test_a_wait_for_ready_batches_is_an_alarm_where_doing_without_workers_helps() -> None:
    finding = said(waiting_for_ready(fix=tried_without(0.022)))["input.bound"]
    assert finding.status == "warn"
    assert "With num_workers=0 it is 1.2 times as fast" in finding.summary
    assert said(waiting_for_ready(fix=tried_without(0.026)))["input.bound"].status == "ok"
    assert said(waiting_for_ready(fix=None))["input.bound"].status == "warn", "nothing else was predicted to help"


def test_a_wait_for_ready_batches_on_a_busy_machine_is_not_judged() -> None:
    finding = said(waiting_for_ready(queued=0.01))["input.bound"]
    assert finding.status == "not_measured"
    assert "other programs have the processors for 50%" in finding.summary
    assert said(waiting_for_ready(queued=0.01), busy_share=0.6)["input.bound"].status == "warn"
    finding = said(waiting_for_ready(queued=0.01, fix=tried_without(0.022)))["input.bound"]
    assert finding.status == "warn"
    assert "without them it may be another gain" in finding.summary


def test_a_change_that_does_not_help_on_a_busy_machine_judges_nothing() -> None:
    facts = pipeline(fix={"change": "workers", "value": 4, "predicted_s": 0.01, "before_s": 0.04, "after_s": 0.04})
    assert said(facts)["input.bound"].status == "warn"
    for one in facts["rounds"]:
        one.update(cached_cpu_s=0.002, cached_queued_s=0.008)
    assert said(facts)["input.bound"].status == "not_measured"


def test_what_is_waited_for_longer_than_making_it_takes_is_the_hand_over() -> None:
    facts = waiting_for_ready()
    facts["variants"][0]["batch_s"] = 0.015  # on a busy machine a loader drained by itself is not quick
    assert find_cause(facts).name == "hand_over"
    for one in facts["rounds"]:
        one.update(steady_s=0.0215, wait_s=0.0015)
    assert find_cause(facts).name != "hand_over"


def without_workers(fetch_s: float) -> dict[str, Any]:
    facts = pipeline(fetch_s=fetch_s, compute_s=0.02, workers=2, start_s=0.3, batches=5)
    row = {"change": "in_process", "value": 0, "workers": 0, "batch_s": fetch_s}
    facts["variants"].append({**facts["variants"][0], **row})
    return facts


def test_without_workers_a_step_is_computing_and_loading_and_no_epoch_starts_any() -> None:
    (found,) = [p for p in predictions(without_workers(0.004)) if p.change == "in_process"]
    assert found.period_s == pytest.approx(0.024)


def test_restarts_are_answered_by_workers_that_stay() -> None:
    fix = find_cause(without_workers(0.004)).fix
    assert fix is not None
    assert fix.change == "persistent"


def test_a_change_that_is_predicted_to_cost_time_is_not_tried() -> None:
    facts = pipeline(fetch_s=0.03, compute_s=0.01, tried=(1,))
    for row in facts["variants"]:
        row["batch_s"] = 0.1
    assert find_cause(facts).fix is None


def test_processors_that_other_programs_have_are_not_ours() -> None:
    facts = pipeline(fetch_s=0.04, compute_s=0.01, cores=2, batches=10**9)
    for row in facts["variants"]:
        row["cpu_s"] = 0.04
    for one in facts["rounds"]:
        one.update(cached_cpu_s=0.01, cached_queued_s=0.01)
    found = {p.value: p.period_s for p in predictions(facts) if p.change == "workers"}
    assert found[4] == pytest.approx(0.05), "50 ms of work a step, and one of two processors"
    for one in facts["rounds"]:
        one.update(
            cached_cpu_s=0.001, cached_queued_s=0.002
        )  # of 10 ms: a processor comes late, which is not how much there is
    found = {p.value: p.period_s for p in predictions(facts) if p.change == "workers"}
    assert found[4] == pytest.approx(0.041 / 2)


def period_of(facts: dict[str, Any], change: str, value: Any) -> float:
    (found,) = [p.period_s for p in predictions(facts) if (p.change, p.value) == (change, value)]
    return found


def test_handing_a_batch_over_is_part_of_the_step_and_an_epoch_begins_with_a_wait() -> None:
    facts = pipeline(fetch_s=0.03, compute_s=0.01, batches=10)
    for row in facts["variants"]:
        row["handoff_s"] = 0.005
    assert period_of(facts, "workers", 4) == pytest.approx(0.01 + 0.005 + 0.03 / 10)
    assert period_of(facts, "workers", 1) == pytest.approx(0.03 + 0.03 / 10)


def test_dropping_bulk_is_predicted_from_a_step_on_a_batch_at_hand_and_the_rest_from_the_loop() -> None:
    facts = pipeline(fetch_s=0.03, compute_s=0.01, collate=0.9, batches=10**9)
    facts["variants"].append(DROP)
    for one in facts["rounds"]:
        one["step_s"] = 0.02
    assert period_of(facts, "drop", ["extra"]) == pytest.approx(0.01 + 0.002)
    assert period_of(facts, "workers", 4) == pytest.approx(0.02)


def test_behind_a_device_the_wait_is_what_a_batch_at_hand_would_save() -> None:
    facts = pipeline(fetch_s=0.03, compute_s=0.028, ahead=True, batches=10**9)
    for one in facts["rounds"]:
        one.update(steady_s=0.03, wait_s=0.029)
    assert step_time(facts).wait_s == pytest.approx(0.002, rel=1e-3)
    facts["ahead"] = False
    assert step_time(facts).wait_s == pytest.approx(0.029, rel=1e-3)


def test_starting_workers_is_never_more_than_the_wait() -> None:
    facts = pipeline(fetch_s=0.01, compute_s=0.05, ahead=True, workers=2, start_s=0.3, batches=5)
    for one in facts["rounds"]:
        one.update(steady_s=0.02, wait_s=0.0)
    found = step_time(facts)
    assert found.restart_s == found.wait_s == pytest.approx(0.03)


def test_a_fetch_that_explains_little_of_the_wait_is_not_its_cause() -> None:
    found = find_cause(pipeline(fetch_s=0.05, compute_s=0.01, ahead=True, syncs=SYNC))
    assert found.name == "latency", "without the fetch a step still takes the 50 ms of a batch"


def test_a_fetch_now_and_then_is_no_cause() -> None:
    facts = pipeline(fetch_s=0.009, ahead=True, syncs={**SYNC, "share": 0.05, "per_step": 0.05})
    assert find_cause(facts).name == "latency"


def test_time_in_the_queue_of_the_scheduler_is_no_preprocessing() -> None:
    facts = pipeline(fetch_s=0.03, blocked=0.1)
    facts["fetch"]["items_queued_s"] = 0.02
    assert find_cause(facts).parts == pytest.approx(
        {"latency": 0.003, "preprocessing": 0.007, "collate": 0, "unused_features": 0}
    )


def test_fewer_workers_are_chosen_where_they_save_nearly_as_much() -> None:
    fix = find_cause(pipeline(fetch_s=0.044, compute_s=0.02, tried=(1, 2, 4), batches=10**9)).fix
    assert fix is not None
    assert (fix.change, fix.value) == ("workers", 2)


def test_without_a_step_workers_are_the_answer_and_not_stored_items() -> None:
    fix = find_cause(pipeline(step="none", compute_s=0.0)).fix
    assert fix is not None
    assert fix.change == "workers"


def test_a_change_that_does_not_help_is_not_praised() -> None:
    fix = {"change": "workers", "value": 4, "predicted_s": 0.035, "before_s": 0.040, "after_s": 0.050}
    assert "Tried: num_workers=4; it does not help, 0.8 times" in said(pipeline(fix=fix))["input.bound"].summary


def test_without_a_step_and_without_times() -> None:
    assert said(pipeline(step="none", compute_s=0.0))["input.bound"].status == "not_measured"
    facts = pipeline()
    for one in facts["rounds"]:
        one.update(steady_s=math.nan, wait_s=math.nan, step_s=math.nan, starts=[])
    assert said(facts)["input.bound"].status == "not_measured"


def test_nobody_looked() -> None:
    diagnosis = diagnose_input_pipeline(Looked({}))
    assert [f.code for f in diagnosis] == list(CODES)
    assert {f.status for f in diagnosis} == {"not_measured"}


def test_unused_features_by_their_bytes() -> None:
    reads = {"read": ["x"], "unread": ["mask"], "moved_bytes": 1000, "read_bytes": 900, "known": True}
    finding = said(pipeline(reads={**reads, "bytes": {"x": 90_000, "mask": 10_000}}))["input.unused_features"]
    assert (finding.status, finding.value) == ("warn", 0.1)
    assert "never reads mask" in finding.summary
    finding = said(pipeline(reads={**reads, "bytes": {"x": 900, "mask": 10}}))["input.unused_features"]
    assert finding.status == "ok"
    assert "too few to matter" in finding.summary
    index = {**reads, "unread": ["index"], "bytes": {"x": 900, "index": 100}}
    assert said(pipeline(reads=index))["input.unused_features"].status == "ok", "100 bytes are nothing"
    assert said(pipeline(reads=index), least_unused_bytes=10)["input.unused_features"].status == "warn"
    hidden = {**reads, "read": [], "known": False, "bytes": {"x": 900, "mask": 100}}
    assert said(pipeline(reads=hidden))["input.unused_features"].status == "not_measured"
    assert said(pipeline(reads=None))["input.unused_features"].status == "not_measured"


@pytest.mark.parametrize(("share", "status"), [(0.0, "ok"), (0.1, "ok"), (0.5, "warn"), (1.0, "warn")])
def test_synchronisations_by_their_share_of_the_steps(share: float, status: str) -> None:
    finding = said(pipeline(syncs={**SYNC, "share": share}))["input.sync_every_step"]
    assert finding.status == status
    assert said(pipeline(syncs=None))["input.sync_every_step"].status == "not_measured"


def test_epochs_that_lie() -> None:
    def found(**changes: Any) -> Any:
        return said(pipeline(**changes))["input.example_count"]

    assert found().status == "ok"
    assert found(length={"claimed": 800, "yielded": 600}).value == pytest.approx(0.75)
    assert found(length={"claimed": 800, "yielded": 800}).status == "ok"
    doubled = {"workers": 2, "without": 40, "with_workers": 80, "same": False}
    assert found(epochs=doubled, workers=2).value == 2.0
    assert found(epochs=doubled, workers=2).status == "warn"
    assert found(epochs=doubled, variants=[], length={"claimed": 40, "yielded": 40}).status == "ok"
    tried = {p.value for p in predictions(pipeline(epochs=doubled)) if p.change == "workers"}
    assert tried == {1}, "more would repeat each other's examples"
    facts = pipeline()
    facts["variants"][1]["same_order"] = False
    assert said(facts)["input.example_count"].status == "warn"
    assert found(variants=[], length={"claimed": None, "yielded": None}).status == "not_measured"


def test_a_sampler_says_how_long_an_epoch_is() -> None:
    def found(claimed: int | None, yielded: int | None) -> Any:
        return said(pipeline(length={"of": "batches", "claimed": claimed, "yielded": yielded}))["input.example_count"]

    assert found(12, 12).status == found(None, 12).status == found(12, None).status == "ok"
    short = found(12, 9)
    assert (short.status, short.value) == ("warn", 0.75)
    assert "says that an epoch has 12 batches, and it gives 9" in short.summary


def test_an_incomplete_batch_may_be_dropped_by_each_worker() -> None:
    facts = pipeline(workers=2, length={"claimed": 30, "yielded": 16})
    assert said(facts)["input.example_count"].status == "warn"
    facts["loader"]["drop_last"] = True
    assert said(facts)["input.example_count"].status == "ok"


def test_items_too_slow_to_be_asked_for_again() -> None:
    assert said(pipeline(draws=None))["data.worker_rng"].status == "not_measured"
    alike = {"workers": 2, "random": True, "same_in_workers": True, "same_in_epochs": True, "p": 1e-9, "visits": 20}
    assert said(pipeline(draws=alike))["data.worker_rng"].status == "warn"
