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
from workbench.parameter_server.training.work_time import closure_size, stretch_seconds
from workbench.topics.parameter_server.diagnose import diagnose_parameter_server
from workbench.topics.parameter_server.server_load import CODES, saturation, server_throughput

OK = dict.fromkeys(CODES, "ok")
UNKNOWN = dict.fromkeys(("ps.imbalance", "ps.hotspot"), "not_measured")
BUSY = work(compute_s=1.0, push_s=2.5)


def statuses(**changes: Any) -> dict[str, str]:
    return {f.code: f.status for f in diagnose_parameter_server(served(facts(**changes)))}


def held(*blocks: dict[str, Any], name: str = "net@{}") -> list[dict[str, Any]]:
    """Servers that hold these blocks alone."""
    return [{**server(k), "blocks": {name.format(k): each}} for k, each in enumerate(blocks)]


def one_variable(name: str, requests: int, size: int) -> list[dict[str, Any]]:
    return [server(0, **{name: block(requests, size, 0.0)}), server(1)]


def test_a_healthy_trial_has_each_code_once_and_no_alarm_and_is_left_as_it_was() -> None:
    record = served(facts())
    before = copy.deepcopy(record.facts)
    found = diagnose_parameter_server(record)
    assert [(f.code, f.status) for f in found] == list(OK.items())
    assert all(f.value is not None and f.threshold is not None and f.unit and f.evidence for f in found)
    json.dumps(found.to_dict())
    assert record.facts == before
    audit = Audit(facts={"parameter_server": {"0": facts()}}, workload="mine")
    assert {f.code: f.status for f in diagnose_parameter_server(audit)} == OK


def test_a_record_without_servers_and_a_trial_that_is_not_there() -> None:
    found = diagnose_parameter_server(served())
    assert {f.status for f in found} == {"not_measured"}
    assert all("wb.ps.Trainer" in f.summary for f in found)
    record = served(facts(), facts(work=[work(compute_s=0.1)] * 3))
    assert diagnose_parameter_server(record)["ps.bound"].status == "ok"
    assert diagnose_parameter_server(record, trial=1)["ps.bound"].status == "warn"
    with pytest.raises(UsageError, match=r"trial=7.*: 0, 1\."):
        diagnose_parameter_server(record, trial=7)


@pytest.mark.parametrize(
    ("servers", "code", "clause", "summary", "advice"),
    [
        (held(block(parameters={"0.weight": 150, "0.bias": 100}), block(600, 333, parameters={"1.bias": 10})),
         "ps.imbalance", "T13.2", "ps 0 has 1.50 times .* in bytes, most of it parameter '0.weight'", "variable_partitioner"),
        (held(block(600, 4000), block(600, 400), name="words/shard_{}"), "ps.imbalance", "T13.4", "ps 0", "shuffled"),
        ([server(0, lr=block(3 * UPDATES, 8, 0.0)), server(1)], "ps.imbalance", "T13.3", "in requests, most of it 'lr'", "ps.hotspot"),
        (one_variable("lr", UPDATES, 8), "ps.hotspot", "T13.3", "'lr' on ps 0 is asked for 1 times a step", "schedule"),
        (one_variable("table", 2 * UPDATES, 10**6), "ps.hotspot", "T13.3", "'table'", "Split it"),
    ],
)  # fmt: skip
def test_a_load_that_is_planted_is_named_with_its_remedy(
    servers: Any, code: str, clause: str, summary: str, advice: str
) -> None:
    found = diagnose_parameter_server(served(facts(servers=servers)))[code]
    assert found.status == "warn"
    assert found.clause == clause
    assert re.search(summary, found.summary), found.summary
    assert re.search(advice, found.advice[0]), found.advice


def test_the_values_of_the_loads_are_those_of_their_definition() -> None:
    small = held(block(parameters={"0.weight": 1}), block(600, 333, parameters={"1.bias": 10}))
    found = diagnose_parameter_server(served(facts(servers=small)))["ps.imbalance"]
    assert found.value == pytest.approx(2 * 1000 / (1000 + 333), rel=1e-9)
    assert found.evidence["ratios"]["requests"] == pytest.approx(1.0)
    hot = diagnose_parameter_server(served(facts(servers=one_variable("lr", UPDATES, 8))), hot_ratio=1.25)["ps.hotspot"]
    assert hot.value == pytest.approx(1.0)
    assert hot.status == "ok", "its server does not notice it"
    assert "1.20 times the mean" in hot.summary


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([server(0)], {}),
        (one_variable("lr", UPDATES // 10, 8), {}),
        ([server(k, **{f"words/shard_{k}": block(UPDATES, 8)}) for k in range(2)], {}),
        ([server(k, **{f"words/shard_{k}": block(n, 8)}) for k, n in enumerate((2 * UPDATES, 10))], {"ps.imbalance": "warn"}),
        (held(block(apply_s=2.0), block(apply_s=0.2)), {"ps.imbalance": "warn"}),
        (held(block(apply_s=0.02), block(apply_s=0.002)), {}),
        ([], UNKNOWN),
        (None, UNKNOWN),
        (held(*[block() | {"bytes_in": None, "requests": None}] * 2), UNKNOWN),
        (held(*[block() | {"bytes_in": math.nan, "requests": math.nan}] * 2), UNKNOWN),
    ],
    ids=["one server", "now and then", "on all", "on all, unevenly", "slow", "noise", "none", "unknown", "no value", "nan"],
)  # fmt: skip
def test_loads_that_are_no_alarm_or_not_known(servers: Any, expected: dict[str, str]) -> None:
    assert statuses(servers=servers) == OK | expected


@pytest.mark.parametrize("steps", [0, None, math.nan])
def test_requests_without_steps_are_not_measured(steps: Any) -> None:
    assert statuses(steps=steps, servers=one_variable("lr", 300, 8))["ps.hotspot"] == "not_measured"


def test_gradients_far_older_than_the_workers_explain_are_told_with_the_worker() -> None:
    """Of the rows of this trial alone."""
    lags = np.where(np.arange(UPDATES) % WORKERS == 2, 20.0, 1.0)
    ages = {"1": 200, "20": 100}
    record = served(facts(staleness_steps=[ages, ages]), facts(), lags=lags)
    record.steps.loc[record.steps["trial"] == 1, "staleness_steps"] = 1.0
    found = diagnose_parameter_server(record)["ps.staleness"]
    assert (found.status, found.value, found.threshold) == ("warn", 20, 4)
    assert found.evidence["mean"] == pytest.approx((200 + 2000) / 300)
    assert "Worker 2 makes 33% of the updates, 20 updates late" in found.summary
    other = diagnose_parameter_server(record, trial=1)["ps.staleness"].evidence
    assert [row["mean"] for row in other["by_worker"]] == [1.0] * WORKERS


def test_a_loss_that_follows_staleness_is_told_and_where_in_the_run_it_was() -> None:
    lags = np.random.default_rng(1).integers(0, 5, UPDATES)
    record = served(facts(), lags=lags)
    record.steps["loss"] *= np.exp(0.3 * np.roll(lags, 1))
    found = diagnose_parameter_server(record)["ps.staleness"]
    assert found.evidence["relations"]["loss"]["rho"] > 0.5
    assert "higher after staler updates" in found.summary
    assert "No relation" in diagnose_parameter_server(served(facts(), lags=lags))["ps.staleness"].summary
    early = served(facts(), lags=np.where(np.arange(UPDATES) < 30, 4, 1))
    assert diagnose_parameter_server(early)["ps.staleness"].evidence["mean_by_tenth"] == [4.0] + [1.0] * 9


@pytest.mark.parametrize("ages", [[], [{}, {}], [{"0": 3}], [{"nan": 100}], [{"0": None}]])
def test_too_few_or_unknown_ages_are_not_measured(ages: Any) -> None:
    assert statuses(staleness_steps=ages)["ps.staleness"] == "not_measured"


@pytest.mark.parametrize(
    ("column", "value"), [("staleness_steps", 2.0), ("loss", 1.0), ("loss", np.nan), ("loss", -1.0)]
)
def test_constant_ages_and_a_constant_or_nan_loss_have_no_relation(column: str, value: float) -> None:
    record = served(facts())
    record.steps[column] = value
    found = diagnose_parameter_server(record)["ps.staleness"]
    assert "loss" not in found.evidence["relations"]
    assert found.status == "ok"


@pytest.mark.parametrize(
    ("changes", "cause", "status", "advice"),
    [
        ({"work": [work(compute_s=0.5)] * 3}, "coordinator", "warn", "steps_per_closure="),
        ({"work": [BUSY] * 3}, "server", "warn", "more servers"),
        ({"work": [BUSY] * 3, "servers": held(block(), block(600, 10))}, "server", "warn", "variable_partitioner"),
        ({"work": [work(compute_s=3.8, data_wait_s=0.0)] * 3}, "worker", "ok", "More workers"),
        ({"work": [work(compute_s=0.5, data_wait_s=3.0)] * 3}, "worker", "ok", "input.bound"),
        ({"work": [work(compute_s=9.0)] * 3}, "worker", "ok", "More workers"),  # clocks that disagree
    ],
)
def test_who_keeps_whom_waiting(changes: dict[str, Any], cause: str, status: str, advice: str) -> None:
    found = diagnose_parameter_server(served(facts(**changes)))["ps.bound"]
    assert (found.evidence["cause"], found.status) == (cause, status)
    assert advice in found.advice[0]
    assert sum(found.evidence["shares"].values()) == pytest.approx(1.0)
    assert min(found.evidence["shares"].values()) >= 0


def test_the_numbers_are_those_of_the_definition() -> None:
    found = diagnose_parameter_server(served(facts(work=[work(compute_s=0.5)] * WORKERS)))["ps.bound"]
    busy = 3 * (0.5 + 0.2 + 0.2 + 0.1)
    assert found.evidence["shares"]["idle"] == pytest.approx(1 - busy / 12)
    assert found.evidence["step_s"] == pytest.approx(busy / UPDATES)
    assert found.evidence["dispatch_s"] == pytest.approx((12 - busy) / UPDATES)
    assert found.evidence["updates_per_s"] == pytest.approx(UPDATES / 4.0)
    # a share of 30 / 3: 0.03 + 0.01 behind, against 0.06 + 0.025
    assert found.evidence["suggested_steps_per_closure"] == 10


@pytest.mark.parametrize(
    "changes",
    [{"training_s": None}, {"training_s": 0.0}, {"work": []}, {"updates": 10}, {"work": [work() | {"pull_s": None}]}],
)
def test_time_that_nobody_took_is_not_measured(changes: dict[str, Any]) -> None:
    assert statuses(**changes)["ps.bound"] == "not_measured"


@pytest.mark.parametrize(
    ("made", "flat", "said"),
    [
        ({1: (100,), 2: (190,), 3: (280,)}, None, "3 were the fastest"),
        ({1: (100,), 2: (190,), 3: (191,)}, 2, "more than 2 were not"),
        ({1: (100, 400, 110), 2: (190, 200, 20)}, None, "2 were the fastest"),  # by their medians
        ({3: (100, 120)}, "nothing", ""),
    ],
)
def test_where_more_workers_stop_helping_is_said(made: dict[int, Any], flat: Any, said: str) -> None:
    record = served(facts())
    record.facts["parameter_server_runs"] = [
        {"name": f"{k} workers"} | facts(workers=k, updates=n) for k, runs in made.items() for n in runs
    ] + [{"name": "sharded"} | facts(workers=9, updates=900), {"name": "x"} | facts(workers=9, steps_per_closure=5)]
    found = diagnose_parameter_server(record)["ps.bound"]
    assert found.evidence.get("saturated_at_workers", "nothing") == flat
    assert said in found.summary
    if flat != "nothing":
        rates = {str(k): sorted(runs)[len(runs) // 2] / 4 for k, runs in made.items()}
        assert found.evidence["updates_per_s_by_workers"] == rates


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


@pytest.mark.parametrize("steps", [[1.0], [1.0, 1.2, 0.9], [1.0] * 8, [1.0, 1.0, 2.5], [1.0, 1.6] * 3])
@pytest.mark.parametrize("cost", [0.02, 1.0, 40.0])
def test_the_chosen_size_reaches_nine_tenths_of_the_best_whatever_worker_is_slower(
    cost: float, steps: list[float]
) -> None:
    """T14.3."""
    for updates in (100, 256, 1000):
        found = closure_size(cost, steps, updates)
        shown = [step * (1.07 if k == len(steps) - 1 else 1.0) for k, step in enumerate(steps)]
        best = min(stretch_seconds(k, cost, shown, updates) for k in range(1, updates + 1))
        assert stretch_seconds(found, cost, shown, updates) * 0.9 <= best, found


def test_equal_shares_are_cut_where_a_slower_worker_would_keep_the_others_waiting() -> None:
    """Four workers of one speed take a quarter each only where asking costs more than the tenth that one may be slower."""
    assert closure_size(0.05, [1.0] * 4, 120) < 10
    assert closure_size(1.0, [1.0] * 4, 120) == 30


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0])
def test_closure_size_is_one_where_nothing_was_measured(bad: float) -> None:
    assert closure_size(bad, [1.0], 100) == closure_size(1.0, [bad], 100) == closure_size(1.0, [], 100) == 1
    assert closure_size(1.0, [1.0], 0) == closure_size(1.0, [1.0], 1) == 1
    assert closure_size(1e9, [1e-9] * 4, 100) in (25, 100)


def test_throughput_is_updates_over_seconds_a_trial() -> None:
    table = server_throughput(served(facts(), facts(updates=600, steps_per_closure="auto")))
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
