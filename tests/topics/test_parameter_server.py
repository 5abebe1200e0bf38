"""Facts of a healthy trial, with one thing planted in them: its own verdict changes, and no other."""

from __future__ import annotations

import copy
import json
import math
import re
from typing import Any

import numpy as np
import pytest

from tests.helpers.server_facts import UPDATES, WORKERS, block, facts, served, server, work
from workbench.errors import UsageError
from workbench.findings.audited import Audit
from workbench.parameter_server.trials.closure_size import closure_size, stretch_seconds
from workbench.topics.parameter_server.diagnose import CODES, _for_servers, diagnose_parameter_server, time_shares
from workbench.topics.parameter_server.server_load import saturation, server_throughput

OK = dict.fromkeys(CODES, "ok")


def statuses(**changes: Any) -> dict[str, str]:
    return {f.code: f.status for f in diagnose_parameter_server(served(facts(**changes)))}


def one_variable(name: str, requests: int, size: int) -> list[dict[str, Any]]:
    return [server(0, **{name: block(requests, size, 0.0)}), server(1)]


def test_a_healthy_trial_has_each_code_once_with_its_clause_and_no_alarm() -> None:
    found = diagnose_parameter_server(served(facts()))
    assert {f.code: f.status for f in found} == OK
    assert [f.code for f in found] == list(CODES)
    assert all(re.fullmatch(r"T\d+\.\d+", f.clause or "") for f in found)
    assert all(f.value is not None and f.threshold is not None and f.unit and f.evidence for f in found)
    json.dumps(found.to_dict())


def test_a_record_without_servers_is_not_measured_and_says_what_would_measure() -> None:
    found = diagnose_parameter_server(served())
    assert {f.status for f in found} == {"not_measured"}
    assert all("wb.ps.Trainer" in f.summary for f in found)


def test_an_audit_without_frames_is_judged_by_its_facts() -> None:
    audit = Audit(facts={"parameter_server": {"0": facts()}}, workload="mine")
    assert {f.code: f.status for f in diagnose_parameter_server(audit)} == OK


def test_a_trial_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"trial=7.*: 0, 1\."):
        diagnose_parameter_server(served(facts(), facts()), trial=7)


def test_another_trial_can_be_judged() -> None:
    record = served(facts(), facts(work=[work(compute_s=0.1)] * 3))
    assert diagnose_parameter_server(record)["ps.bound"].status == "ok"
    assert diagnose_parameter_server(record, trial=1)["ps.bound"].status == "warn"


def test_input_is_left_as_it_was() -> None:
    record = served(facts())
    before = copy.deepcopy(record.facts)
    diagnose_parameter_server(record)
    assert record.facts == before


# ps.imbalance


def test_a_server_with_three_quarters_of_the_bytes_is_an_imbalance_and_its_parameter_is_named() -> None:
    small = block(600, 1000 // 3, parameters={"1.bias": 10})
    servers = [server(0), {**server(1), "blocks": {"net@1": small}}]
    found = diagnose_parameter_server(served(facts(servers=servers)))["ps.imbalance"]
    assert found.status == "warn"
    assert found.value == pytest.approx(2 * 1000 / (1000 + 333), rel=1e-9)
    assert found.clause == "T13.2"
    assert "'0.weight'" in found.summary
    assert "ps 0" in found.summary
    assert "variable_partitioner" in found.advice[0]
    assert found.evidence["ratios"]["requests"] == pytest.approx(1.0)


def test_the_shard_with_the_frequent_words_is_told_to_be_shuffled() -> None:
    servers = [{**server(k), "blocks": {f"words/shard_{k}": block(600, size)}} for k, size in enumerate((4000, 400))]
    found = diagnose_parameter_server(served(facts(servers=servers)))["ps.imbalance"]
    assert (found.status, found.clause) == ("warn", "T13.4")
    assert "shuffled" in found.advice[0]


def test_slow_applying_counts_where_it_takes_time_and_is_noise_where_it_does_not() -> None:
    def of(seconds: float) -> str:
        blocks = [block(apply_s=seconds), block(apply_s=seconds / 10)]
        servers = [{**server(k), "blocks": {f"net@{k}": b}} for k, b in enumerate(blocks)]
        return statuses(servers=servers)["ps.imbalance"]

    assert of(2.0) == "warn"
    assert of(0.02) == "ok"


def test_one_server_has_nothing_to_balance() -> None:
    assert statuses(servers=[server(0)]) == OK


@pytest.mark.parametrize("servers", [[], [server(0, x=block(0, 0)) | {"blocks": {}}] * 2, None])
def test_servers_that_nobody_asked_are_not_measured(servers: Any) -> None:
    found = statuses(servers=servers)
    assert found["ps.imbalance"] == found["ps.hotspot"] == "not_measured"


@pytest.mark.parametrize("value", [None, math.nan, "nan"])
def test_unknown_loads_are_not_measured(value: Any) -> None:
    broken = [{**server(k), "blocks": {f"net@{k}": block() | {"bytes_in": value, "requests": value}}} for k in range(2)]
    found = statuses(servers=broken)
    assert found["ps.imbalance"] == found["ps.hotspot"] == "not_measured"


# ps.hotspot


def test_an_lr_variable_that_every_step_reads_is_a_hotspot() -> None:
    found = diagnose_parameter_server(served(facts(servers=one_variable("lr", UPDATES, 8))))["ps.hotspot"]
    assert found.status == "warn"
    assert found.value == pytest.approx(1.0)
    assert "'lr' on ps 0" in found.summary
    assert "schedule" in found.advice[0]
    assert found.clause == "T13.3"


def test_one_that_its_server_does_not_notice_is_none() -> None:
    found = diagnose_parameter_server(served(facts(servers=one_variable("lr", UPDATES, 8))), hot_ratio=1.25)
    assert found["ps.hotspot"].status == "ok"
    assert "1.20 times the mean" in found["ps.hotspot"].summary


def test_a_large_one_is_told_to_be_split() -> None:
    found = diagnose_parameter_server(served(facts(servers=one_variable("table", 2 * UPDATES, 10**6))))["ps.hotspot"]
    assert found.status == "warn"
    assert "Split" in found.advice[0]


def test_the_same_variable_read_now_and_then_is_none() -> None:
    assert statuses(servers=one_variable("lr", UPDATES // 10, 8)) == OK


def test_a_variable_with_a_shard_on_every_server_is_none() -> None:
    servers = [server(k, **{f"words/shard_{k}": block(UPDATES, 8)}) for k in range(2)]
    assert statuses(servers=servers) == OK


@pytest.mark.parametrize("steps", [0, None, math.nan])
def test_requests_without_steps_are_not_measured(steps: Any) -> None:
    assert statuses(steps=steps, servers=one_variable("lr", 300, 8))["ps.hotspot"] == "not_measured"


# ps.staleness


def test_gradients_far_older_than_the_workers_explain_are_told_with_the_worker() -> None:
    lags = np.where(np.arange(UPDATES) % WORKERS == 2, 20, 1)
    ages = {"1": 200, "20": 100}
    found = diagnose_parameter_server(served(facts(staleness_steps=[ages, ages]), lags=lags))["ps.staleness"]
    assert (found.status, found.value, found.threshold) == ("warn", 20, 4)
    assert found.evidence["mean"] == pytest.approx((200 + 2000) / 300)
    assert "Worker 2 makes 33% of the updates" in found.summary


def test_one_worker_is_never_stale() -> None:
    found = diagnose_parameter_server(
        served(facts(workers=1, staleness_steps=[{"0": 300}, {"0": 300}], work=[work()]), lags=np.zeros(UPDATES))
    )["ps.staleness"]
    assert (found.status, found.value) == ("ok", 0)
    assert found.evidence["relations"] == {}


def test_a_loss_that_follows_staleness_is_told() -> None:
    lags = np.random.default_rng(1).integers(0, 5, UPDATES)
    record = served(facts(), lags=lags)
    record.steps["loss"] *= np.exp(0.3 * np.roll(lags, 1))
    found = diagnose_parameter_server(record)["ps.staleness"]
    assert found.evidence["relations"]["loss"]["rho"] > 0.5
    assert "higher behind staler updates" in found.summary
    assert "No relation" in diagnose_parameter_server(served(facts(), lags=lags))["ps.staleness"].summary


def test_where_in_the_run_it_was_is_in_the_evidence() -> None:
    lags = np.where(np.arange(UPDATES) < 30, 4, 1)
    found = diagnose_parameter_server(served(facts(), lags=lags))["ps.staleness"]
    assert found.evidence["mean_by_tenth"] == [4.0] + [1.0] * 9


@pytest.mark.parametrize("ages", [[], [{}, {}], [{"0": 3}], [{"nan": 100}], [{"0": None}]])
def test_too_few_or_unknown_ages_are_not_measured(ages: Any) -> None:
    assert statuses(staleness_steps=ages)["ps.staleness"] == "not_measured"


def test_constant_ages_and_a_constant_or_nan_loss_have_no_relation() -> None:
    for column, value in (("staleness_steps", 2.0), ("loss", 1.0), ("loss", np.nan), ("loss", -1.0)):
        record = served(facts())
        record.steps[column] = value
        found = diagnose_parameter_server(record)["ps.staleness"]
        assert "loss" not in found.evidence["relations"]
        assert found.status == "ok"


# ps.bound


@pytest.mark.parametrize(
    ("spent", "cause", "status", "advice"),
    [
        (work(compute_s=0.5), "coordinator", "warn", "steps_per_closure="),
        (work(compute_s=1.0, push_s=2.5), "server", "warn", "more servers"),
        (work(compute_s=3.8, data_wait_s=0.0), "worker", "ok", "More workers"),
        (work(compute_s=0.5, data_wait_s=3.0), "worker", "ok", "input.bound"),
    ],
)
def test_who_keeps_whom_waiting(spent: dict[str, float], cause: str, status: str, advice: str) -> None:
    found = diagnose_parameter_server(served(facts(work=[spent] * WORKERS)))["ps.bound"]
    assert found.evidence["cause"] == cause
    assert found.status == status
    assert advice in found.advice[0]
    assert sum(found.evidence["shares"].values()) == pytest.approx(1.0)


def test_uneven_servers_are_told_to_be_sharded_first() -> None:
    servers = [server(0), {**server(1), "blocks": {"net@1": block(600, 10)}}]
    found = diagnose_parameter_server(served(facts(work=[work(compute_s=1.0, push_s=2.5)] * 3, servers=servers)))
    assert "variable_partitioner" in found["ps.bound"].advice[0]


def test_the_numbers_are_those_of_the_definition() -> None:
    found = diagnose_parameter_server(served(facts(work=[work(compute_s=0.5)] * WORKERS)))["ps.bound"]
    busy = 3 * (0.5 + 0.2 + 0.2 + 0.1)
    assert found.evidence["shares"]["idle"] == pytest.approx(1 - busy / 12)
    assert found.evidence["step_s"] == pytest.approx(busy / UPDATES)
    assert found.evidence["dispatch_s"] == pytest.approx((12 - busy) / UPDATES)
    assert found.evidence["updates_per_s"] == pytest.approx(UPDATES / 4.0)
    assert (
        found.evidence["suggested_steps_per_closure"] == 10
    )  # a share of 30 / 3: 0.03 + 0.01 behind, against 0.06 + 0.025


@pytest.mark.parametrize(
    "changes",
    [{"training_s": None}, {"training_s": 0.0}, {"work": []}, {"updates": 10}, {"work": [work() | {"pull_s": None}]}],
)
def test_time_that_nobody_took_is_not_measured(changes: dict[str, Any]) -> None:
    assert statuses(**changes)["ps.bound"] == "not_measured"


@pytest.mark.parametrize(
    ("updates", "flat", "said"), [((100, 190, 280), None, "3 were the fastest"), ((100, 190, 191), 2, "more than 2 were not")]
)  # fmt: skip
def test_where_more_workers_stop_helping_is_said(updates: tuple[int, ...], flat: int | None, said: str) -> None:
    record = served(facts())
    record.facts["parameter_server_runs"] = [
        {"name": f"{k} workers"} | facts(workers=k, updates=made) for k, made in enumerate(updates, start=1)
    ] + [{"name": "sharded"} | facts(workers=9, updates=900), {"name": "x"} | facts(workers=9, steps_per_closure=5)]
    found = diagnose_parameter_server(record)["ps.bound"]
    assert found.evidence["saturated_at_workers"] == flat
    assert said in found.summary
    assert found.evidence["updates_per_s_by_workers"] == {str(k): made / 4 for k, made in enumerate(updates, start=1)}
    assert "saturated_at_workers" not in diagnose_parameter_server(served(facts()))["ps.bound"].evidence


def test_of_one_number_of_workers_nothing_is_said() -> None:
    record = served(facts())
    record.facts["parameter_server_runs"] = [{"name": "3 workers"} | facts(), {"name": "3 workers"} | facts()]
    found = diagnose_parameter_server(record)["ps.bound"]
    assert "Timed" not in found.summary
    assert "updates_per_s_by_workers" not in found.evidence


def test_repeated_runs_count_by_their_median() -> None:
    record = served(facts())
    made = {1: (100, 400, 110), 2: (190, 200, 20)}
    record.facts["parameter_server_runs"] = [
        {"name": f"{k} workers"} | facts(workers=k, updates=each) for k, each_run in made.items() for each in each_run
    ]
    found = diagnose_parameter_server(record)["ps.bound"]
    assert found.evidence["updates_per_s_by_workers"] == {"1": 110 / 4, "2": 190 / 4}


def test_only_the_rows_of_the_trial_count() -> None:
    """Another trial's straggler is not this one's."""
    late = np.where(np.arange(UPDATES) % WORKERS == 2, 20.0, 1.0)
    record = served(facts(), facts())
    record.steps.loc[record.steps["trial"] == 1, "staleness_steps"] = late
    first, second = (diagnose_parameter_server(record, trial=k)["ps.staleness"].evidence for k in (0, 1))
    assert max(row["mean"] for row in first["by_worker"]) < 5
    assert max(row["mean"] for row in second["by_worker"]) == 20


def test_clocks_that_disagree_do_not_give_more_than_the_whole() -> None:
    shares = time_shares(facts(work=[work(compute_s=9.0)] * WORKERS))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["idle"] == 0


# closure_size, throughput, saturation


@pytest.mark.parametrize(
    ("size", "dispatch", "steps", "updates", "seconds"),
    [
        (1, 1.0, [1.0], 5, 10.0),
        (5, 1.0, [1.0], 5, 6.0),
        (2, 1.0, [1.0, 1.0], 8, 6.0),
        (4, 0.0, [1.0, 3.0], 8, 12.0),  # the slow one gets a half
        (1, 0.0, [1.0, 3.0], 8, 6.0),
    ],
)
def test_a_stretch_takes_what_one_can_work_out_by_hand(
    size: int, dispatch: float, steps: list[float], updates: int, seconds: float
) -> None:
    assert stretch_seconds(size, dispatch, steps, updates) == pytest.approx(seconds)


@pytest.mark.parametrize("steps", [[1.0], [1.0, 1.0], [1.0, 1.2, 0.9], [1.0] * 8, [1.0, 1.0, 2.5], [1.0, 1.6] * 3])
@pytest.mark.parametrize("updates", [100, 256, 1000])
@pytest.mark.parametrize("cost", [0.02, 0.3, 1.0, 5.0, 40.0])
def test_the_chosen_size_reaches_nine_tenths_of_the_best_whatever_worker_is_slower(
    cost: float, updates: int, steps: list[float]
) -> None:
    found = closure_size(cost, steps, updates)
    shown = [step * (1.07 if k == len(steps) - 1 else 1.0) for k, step in enumerate(steps)]
    best = min(stretch_seconds(k, cost, shown, updates) for k in range(1, updates + 1))
    assert stretch_seconds(found, cost, shown, updates) * 0.9 <= best, found


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0])
def test_closure_size_is_one_where_nothing_was_measured(bad: float) -> None:
    assert closure_size(bad, [1.0], 100) == closure_size(1.0, [bad], 100) == closure_size(1.0, [], 100) == 1
    assert closure_size(1.0, [1.0], 0) == closure_size(1.0, [1.0], 1) == 1
    assert closure_size(1e9, [1e-9] * 4, 100) in (25, 100)


def test_throughput_is_updates_over_seconds_a_trial() -> None:
    table = server_throughput(
        served(
            facts(),
            facts(updates=600, steps_per_closure="auto"),
        )
    )
    assert table["updates_per_s"].tolist() == [75.0, 150.0]
    assert table["name"].tolist() == ["trial 0", "trial 1"]
    assert table["steps_per_closure"].tolist() == ["1", "auto"]
    assert server_throughput(served()).empty


@pytest.mark.parametrize(
    ("rates", "found"),
    [([100, 190, 280], None), ([100, 190, 195, 192], 2), ([100, 101, 100, 150], None), ([100, 90, 80, 70], 1), ([100, math.nan, 100, 100], 1), ([math.nan] * 4, None)],
)  # fmt: skip
def test_saturation_is_where_more_workers_stop_helping(rates: list[float], found: int | None) -> None:
    assert saturation([1, 2, 3, 4][: len(rates)], rates) == found


def test_uneven_servers_are_evened_before_there_are_more_of_them() -> None:
    even, uneven = {"bytes": 1.1, "seconds": 1.2}, {"bytes": 1.1, "seconds": 1.9}
    assert _for_servers(even, 0.8, 1.5)[0].startswith("Use more servers")
    assert _for_servers(uneven, 0.8, 1.5)[0].startswith("Split large variables")
