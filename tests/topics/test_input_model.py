"""The model of loading beside computing against a loader that is played batch by batch; each cause, its advice, each verdict, the figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import workbench as wb
from tests.helpers.records import MemoryRecord, study
from tests.helpers.simulated_input import pipeline, played
from workbench.findings.audited import Audit
from workbench.plots.style import why_not_measured
from workbench.record.json_values import dumps
from workbench.topics.input.bound import find_cause
from workbench.topics.input.diagnose import CODES, diagnose_input_share
from workbench.topics.input.throughput import Pipeline, loop_period

ENDLESS = {"batches": 10**9}


def audit(facts: dict[str, Any]) -> Audit:
    return Audit(facts={"input_pipeline": facts}, workload="w")


def said(facts: dict[str, Any], code: str = "input.bound", **thresholds: float) -> Any:
    diagnosis = wb.input.diagnose(audit(facts), **thresholds)
    assert [f.code for f in diagnosis] == list(CODES)
    dumps(diagnosis.to_dict())
    for finding in diagnosis:
        assert finding.clause
        assert finding.advice or finding.status not in ("warn", "fail")
    return diagnosis[code]


def advice(facts: dict[str, Any]) -> str:
    finding = said(facts)
    assert finding.status == "warn"
    return "\n".join(finding.advice)


def rounds(facts: dict[str, Any], **changes: float) -> dict[str, Any]:
    for one in facts["rounds"]:
        one.update(changes)
    return facts


def rows(facts: dict[str, Any], **changes: float) -> dict[str, Any]:
    for row in facts["variants"]:
        row.update(changes)
    return facts


def by_loader(facts: dict[str, Any], **settings: Any) -> dict[str, Any]:
    facts["loader"].update(settings)
    return facts


def periods(facts: dict[str, Any], change: str = "workers") -> dict[Any, float]:
    return {
        str(p.value) if isinstance(p.value, list) else p.value: p.period_s
        for p in Pipeline(facts).predictions
        if p.change == change
    }


def tried(change: str, value: Any, after_s: float | None, predicted_s: float = 0.01, **more: Any) -> dict[str, Any]:
    return {"change": change, "value": value, "predicted_s": predicted_s, "before_s": 0.04, "after_s": after_s} | more


@pytest.mark.parametrize("compute_s", [0.0, 0.004, 0.02])
@pytest.mark.parametrize("fetch_s", [0.001, 0.012, 0.05])
def test_predicted_steps_are_those_of_the_played_loader(fetch_s: float, compute_s: float) -> None:
    found = periods(pipeline(fetch_s=fetch_s, compute_s=compute_s, tried=(1, 2, 4, 8), **ENDLESS))
    assert set(found) == {1, 2, 4, 8}
    for workers, period in found.items():
        assert period == pytest.approx(played(fetch_s, compute_s, workers), rel=0.01)


def test_the_step_is_split_into_waiting_hidden_and_computing() -> None:
    alone = Pipeline(pipeline(fetch_s=0.03, compute_s=0.01)).now
    assert (alone.period_s, alone.wait_s, alone.compute_s, alone.wait_share) == pytest.approx((0.04, 0.03, 0.01, 0.75))
    assert (alone.hidden_s, alone.restart_s) == (0, 0)
    beside = Pipeline(pipeline(fetch_s=0.03, compute_s=0.02, workers=2, start_s=0.03, **ENDLESS)).now
    assert (beside.wait_s, beside.hidden_s) == pytest.approx((0, 0.03), abs=1e-9)
    ahead = rounds(pipeline(fetch_s=0.03, compute_s=0.028, ahead=True, **ENDLESS), steady_s=0.03, wait_s=0.029)
    assert Pipeline(ahead).now.wait_s == pytest.approx(0.002, rel=1e-3), "what a batch at hand would save"
    assert Pipeline(ahead | {"ahead": False}).now.wait_s == pytest.approx(0.029, rel=1e-3)
    starts = rounds(pipeline(fetch_s=0.01, compute_s=0.05, ahead=True, workers=2, start_s=0.3, batches=5), steady_s=0.02, wait_s=0.0)  # fmt: skip
    assert Pipeline(starts).now.restart_s == Pipeline(starts).now.wait_s == pytest.approx(0.03), (
        "never more than the wait"
    )


def test_starting_an_epoch_is_shared_out_over_its_batches() -> None:
    one = {"steady_s": 0.01, "wait_s": 0.0, "step_s": 0.01}
    found = [one | {"starts": [9.0, 0.5]}, one | {"starts": [0.5]}]
    assert loop_period(found, 10) == pytest.approx((0.06, 0.05, 0.5)), "the very first start is left out"
    assert loop_period(found, None)[0] == pytest.approx(0.01)
    short = [{"steady_s": math.nan, "wait_s": math.nan, "step_s": 0.01, "starts": [0.2, 0.1]}]
    assert loop_period(short, 1) == pytest.approx((0.11, 0.1, 0.1)), "epochs of one batch are all start"


def test_what_bounds_a_prediction() -> None:
    """Processors, those that other programs have, the hand-over of a batch, the first batch of an epoch, and bulk that is freed."""
    busy = rows(pipeline(fetch_s=0.04, compute_s=0.01, cores=2, **ENDLESS), cpu_s=0.04)
    assert periods(busy)[4] == pytest.approx(0.02)
    assert periods(rounds(busy, cached_cpu_s=0.01, cached_queued_s=0.01))[4] == pytest.approx(0.05), (
        "50 ms of work, one of two"
    )
    late = rounds(busy, cached_cpu_s=0.001, cached_queued_s=0.002)  # of 10 ms: late, which is not how much there is
    assert periods(late)[4] == pytest.approx(0.041 / 2)
    handed = rows(pipeline(fetch_s=0.03, compute_s=0.01, batches=10), handoff_s=0.005)
    assert (periods(handed)[4], periods(handed)[1]) == pytest.approx((0.01 + 0.005 + 0.03 / 10, 0.03 + 0.03 / 10))
    bulk = rounds(pipeline(fetch_s=0.03, compute_s=0.01, collate=0.9, **ENDLESS), step_s=0.02)
    bulk["variants"].append(DROP)
    assert (periods(bulk, "drop")["['extra']"], periods(bulk)[4]) == pytest.approx((0.012, 0.02))
    assert periods(without_workers(0.004), "in_process")[0] == pytest.approx(0.024)
    assert set(periods(pipeline(workers=2, tried=(1, 2, 4)))) == {4}, "what is set is no change"


DROP = {"change": "drop", "value": ["extra"], "dropped": ["extra"], "workers": 0, "batch_s": 0.002, "handoff_s": 0.0,
        "cpu_s": 0.0, "items_s": 0.001, "collate_s": 0.001}  # fmt: skip
SYNC = {"steps": 20, "share": 1.0, "per_step": 1.0, "places": {"train.py:3 step": 1.0}, "how": "calls"}


def without_workers(fetch_s: float) -> dict[str, Any]:
    facts = pipeline(fetch_s=fetch_s, compute_s=0.02, workers=2, start_s=0.3, batches=5)
    facts["variants"].append(
        facts["variants"][0] | {"change": "in_process", "value": 0, "workers": 0, "batch_s": fetch_s}
    )
    return facts


def unread() -> dict[str, Any]:
    facts = pipeline(collate=0.9)
    facts["variants"].append(DROP)
    return facts


def ready(*, wait_s: float = 0.006, queued: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Two workers have batches ready in 2 ms, which are waited for all the same."""
    facts = pipeline(fetch_s=0.002, compute_s=0.02, workers=2, **changes)
    return rounds(facts, steady_s=0.02 + wait_s, wait_s=wait_s, cached_cpu_s=0.01, cached_queued_s=queued)


PLANTED = {
    "latency": pipeline, "preprocessing": lambda: pipeline(blocked=0.1), "collate": lambda: pipeline(collate=0.9), "unused_features": unread,
    "worker_restart": lambda: pipeline(fetch_s=0.01, workers=2, start_s=0.3, batches=5), "hand_over": lambda: ready(wait_s=0.01),
    "too_few_workers": lambda: pipeline(workers=1, tried=(1, 2, 4)), "sync": lambda: pipeline(fetch_s=0.009, ahead=True, syncs=SYNC),
}  # fmt: skip


@pytest.mark.parametrize("cause", PLANTED)
def test_each_cause_is_found(cause: str) -> None:
    facts = PLANTED[cause]()
    found = find_cause(Pipeline(facts))
    assert found.name == cause
    assert cause == "hand_over" or (found.fix is not None and found.fix.period_s < Pipeline(facts).now.period_s)
    finding = said(facts)
    assert (finding.status, finding.evidence["cause"]) == ("warn", cause)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (pipeline(fetch_s=1.0, workers=1, tried=(1, 2, 4)), "latency"),  # no number of workers hides it
        (pipeline(fetch_s=0.05, compute_s=0.01, ahead=True, syncs=SYNC), "latency"),  # without the fetch the batch still takes 50 ms
        (pipeline(fetch_s=0.009, ahead=True, syncs=SYNC | {"share": 0.05, "per_step": 0.05}), "latency"),  # now and then
        (rounds(ready(), steady_s=0.0215, wait_s=0.0015), "hand_over"),
        (pipeline(fetch_s=0.03, collate=0.4, blocked=0.5), "mixed"),
        (rounds(pipeline(fetch_s=0.03, collate=0.3, blocked=0.55), steady_s=0.022, wait_s=0.012), "latency"),  # of what is not hidden
    ],
)  # fmt: skip
def test_what_is_the_cause_and_what_is_not(facts: dict[str, Any], cause: str) -> None:
    assert find_cause(Pipeline(facts)).name == cause


@pytest.mark.parametrize(
    ("facts", "fix"),
    [
        (without_workers(0.004), ("persistent", True)),
        (rows(pipeline(fetch_s=0.03, compute_s=0.01, tried=(1,)), batch_s=0.1), None),  # predicted to cost time
        (pipeline(fetch_s=0.044, compute_s=0.02, tried=(1, 2, 4), **ENDLESS), ("workers", 2)),  # fewer save nearly as much
        (pipeline(step="none", compute_s=0.0), ("workers", 4)),
    ],
)  # fmt: skip
def test_the_change_that_answers_it(facts: dict[str, Any], fix: tuple[str, Any] | None) -> None:
    found = find_cause(Pipeline(facts)).fix
    assert (None if found is None else (found.change, found.value)) == fix


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (pipeline(fetch_s=0.0009, compute_s=0.01), "ok", "8%"),
        (pipeline(fetch_s=0.0015, compute_s=0.01), "warn", "Some"),
        (pipeline(fetch_s=0.004, compute_s=0.01), "warn", "Much"),
        (pipeline(fetch_s=0.0009, compute_s=0.004), "ok", "18%"),  # under a millisecond
        (pipeline(fetch_s=0.03, compute_s=0.02, workers=4, batches=1000), "ok", "0% of a step waits for data"),
        (pipeline(step="none", compute_s=0.0), "not_measured", "Not judged without a step"),
        (rounds(pipeline(), steady_s=math.nan, wait_s=math.nan, step_s=math.nan, starts=[]), "not_measured", "Not measured: no step"),  # type: ignore[arg-type]
        (ready(fix=None), "warn", "Much"),
        (ready(queued=0.01), "not_measured", "Not judged on this busy machine"),
    ],
)  # fmt: skip
def test_where_it_speaks(facts: dict[str, Any], status: str, words: str) -> None:
    finding = said(facts)
    assert finding.status == status
    assert finding.summary.startswith(words), finding.summary


def test_a_wait_for_ready_batches_is_an_alarm_where_doing_without_workers_helps() -> None:
    def fix(after_s: float) -> dict[str, Any]:
        each = [{"before_s": 0.026, "predicted_s": [0.022, 0.022], "after_s": after_s}] * 3
        return tried("in_process", 0, after_s, 0.022, rounds=each) | {"before_s": 0.026}

    assert "With num_workers=0 it is 1.2 times as fast" in said(ready(fix=fix(0.022))).summary
    assert said(ready(fix=fix(0.022))).status == "warn"
    assert said(ready(fix=fix(0.026))).status == "ok"
    busy = said(ready(queued=0.01, fix=fix(0.022)))
    assert (busy.status, "without them the gain may differ" in busy.summary) == ("warn", True)


COUNTED = {"workers": 2, "without": 40, "with_workers": 40, "alike": 0, "same": True}
ALIKE = {"workers": 2, "without": None, "with_workers": None, "alike": 3, "same": False}


def test_of_a_stream_gains_of_workers_are_said_only_where_it_is_shared_out() -> None:
    unknown = by_loader(pipeline(epochs=None), stream=True)
    assert {(p.change, p.value) for p in Pipeline(unknown).predictions} == {("workers", 1)}, (
        "nor can items without an index be stored"
    )
    assert "get_worker_info" in advice(unknown).splitlines()[0]
    assert "could not be counted" in advice(unknown)
    assert "cache_dataset" not in advice(unknown)
    shared = by_loader(pipeline(epochs=COUNTED), stream=True)
    assert set(periods(shared)) == {1, 2, 4}
    assert "get_worker_info" not in advice(shared)
    assert "is not shared out so far" in advice(by_loader(pipeline(epochs=ALIKE), stream=True))


READS = {"read": ["x"], "unread": ["mask"], "moved_bytes": 1000, "read_bytes": 900, "known": True}


@pytest.mark.parametrize(
    ("reads", "least", "status"),
    [
        (READS | {"bytes": {"x": 90_000, "mask": 10_000}}, 4096, "warn"),
        (READS | {"bytes": {"x": 90_000, "mask": 4_000}}, 100, "ok"),
        (READS | {"bytes": {"x": 900, "mask": 100}}, 4096, "ok"),
        (READS | {"bytes": {"x": 900, "mask": 100}}, 10, "warn"),
        (READS | {"read": [], "known": False, "bytes": {"x": 900, "mask": 100}}, 10, "not_measured"),
        (None, 10, "not_measured"),
    ],
)
def test_unused_features_by_their_bytes(reads: Any, least: float, status: str) -> None:
    finding = said(pipeline(reads=reads), "input.unused_features", least_unused_bytes=least)
    assert finding.status == status
    assert ("never reads mask" in finding.summary) == (status in ("warn", "ok"))


@pytest.mark.parametrize(("share", "status"), [(0.0, "ok"), (0.1, "ok"), (0.5, "warn"), (None, "not_measured")])
def test_synchronisations_by_their_share_of_the_steps(share: float | None, status: str) -> None:
    facts = pipeline(syncs=None if share is None else SYNC | {"share": share})
    assert said(facts, "input.sync_every_step").status == status


DOUBLED = {"workers": 2, "without": 40, "with_workers": 80, "same": False}
LENGTH = {"claimed": 800, "yielded": 600}


@pytest.mark.parametrize(
    ("changes", "settings", "status", "value"),
    [
        ({}, {}, "ok", None),
        ({"length": LENGTH}, {}, "warn", 0.75),
        ({"length": LENGTH | {"yielded": 800}}, {}, "ok", None),
        ({"length": LENGTH | {"of": "batches"}}, {}, "warn", 0.75),
        ({"length": {"of": "batches", "claimed": None, "yielded": 12}}, {}, "ok", None),
        ({"length": {"of": "batches", "claimed": 12, "yielded": None}}, {}, "ok", None),
        ({"epochs": DOUBLED, "workers": 2}, {}, "warn", 2.0),
        ({"epochs": DOUBLED, "variants": [], "length": {"claimed": 40, "yielded": 40}}, {}, "ok", None),
        ({"epochs": ALIKE, "workers": 2, "variants": []}, {"stream": True}, "warn", 2.0),
        ({"epochs": ALIKE, "variants": []}, {"stream": True}, "ok", None),
        ({"variants": [], "length": {"claimed": None, "yielded": None}}, {}, "not_measured", None),
        ({"workers": 2, "length": {"claimed": 30, "yielded": 16}}, {}, "warn", 16 / 30),
        ({"workers": 2, "length": {"claimed": 30, "yielded": 16}}, {"drop_last": True}, "ok", None),
    ],
)
def test_epochs_that_lie(changes: Any, settings: Any, status: str, value: float | None) -> None:
    finding = said(by_loader(pipeline(**changes), **settings), "input.example_count")
    assert (finding.status, finding.value) == (status, value if value is None else pytest.approx(value))


def test_orders_draws_and_nothing_looked_at() -> None:
    facts = pipeline()
    facts["variants"][1]["same_order"] = False
    assert said(facts, "input.example_count").status == "warn"
    assert said(pipeline(draws=None), "data.worker_rng").status == "not_measured"
    alike = {"workers": 2, "random": True, "same_in_workers": True, "same_in_epochs": True, "p": 1e-9, "visits": 20}
    assert said(pipeline(draws=alike), "data.worker_rng").status == "warn"
    assert {f.status for f in wb.input.diagnose(Audit(facts={}, workload="w"))} == {"not_measured"}


def timed(wait_s: Any, step_s: Any = 0.010, *, trials: int = 1, lanes: Any = None) -> MemoryRecord:
    record = study()
    wait, step = np.broadcast_arrays(np.asarray(wait_s, dtype=float), np.asarray(step_s, dtype=float))
    frame = {"step": np.arange(len(wait)), "data_wait_s": wait, "step_time_s": step}
    steps = pd.concat([pd.DataFrame({"trial": t, **frame}) for t in range(trials)])
    made = MemoryRecord(record.trials.iloc[:trials], steps, record.evals, record.config)
    if lanes is not None:
        made.lanes = pd.DataFrame({"trial": made.trials["trial"], "lanes": lanes})  # type: ignore[attr-defined]
    return made


def stalled() -> tuple[np.ndarray, np.ndarray]:
    wait, step = np.full(60, 0.0011), np.full(60, 0.110)
    wait[[0, 30]], step[[0, 30]] = (5.0, 2.0), (5.01, 2.01)
    return wait, step


@pytest.mark.parametrize(
    ("record", "thresholds", "status", "value"),
    [
        (timed(np.full(60, 0.006)), {}, "warn", 0.6),
        (timed(np.full(60, 0.0002)), {}, "ok", 0.02),
        (timed(*stalled()), {}, "ok", 0.01),  # a slow first batch and one stall
        (timed(np.full(60, 0.0001), 0.0003), {}, "ok", 1 / 3),
        (timed(np.full(60, 0.0001), 0.0003), {"least_wait_s": 1e-5}, "warn", 1 / 3),
        (timed(np.full(10, 0.006)), {}, "not_measured", None),
        (timed(np.full(60, np.nan)), {}, "not_measured", None),
        (timed(np.full(60, 0.0), 0.0), {}, "not_measured", None),
        (timed(np.full(60, 0.01), np.inf), {}, "not_measured", None),
        (study(), {}, "ok", None),  # does not apply: nothing was loaded
        (timed(np.full(60, 0.006), trials=3, lanes=[3.0, 3.0, 3.0]), {}, "not_measured", None),
        (timed(np.full(60, 0.006), trials=3, lanes=[1.0, 3.0, 3.0]), {}, "warn", 0.6),
    ],
)
def test_the_share_of_waiting_that_any_trial_records(record: Any, thresholds: Any, status: str, value: Any) -> None:
    finding = diagnose_input_share(record, **({"least_total_s": 0.0} | thresholds))["input.bound"]
    assert (finding.status, finding.value) == (status, None if value is None else pytest.approx(value, rel=0.01))
    assert value is None or finding.evidence["trials"] == [0]


def test_a_run_that_waits_for_seconds_in_all_has_nothing_to_gain() -> None:
    record = timed(np.full(60, 0.006))
    for steps, status in ((60, "ok"), (20_000, "warn")):
        record.config["total_steps"] = steps
        assert diagnose_input_share(record)["input.bound"].status == status


def test_what_other_programs_take_is_no_wait() -> None:
    quiet, busy = pipeline(fetch_s=0.03, compute_s=0.01), pipeline(fetch_s=0.03, compute_s=0.01)
    rounds(busy, steady_s=0.08, wait_s=0.03, queued_s=0.04)  # other programs have the processors for half of the time
    assert said(busy).value == pytest.approx(said(quiet).value) == pytest.approx(0.75)
    assert "75% of a step waits for data (30 ms of 40 ms, without what other programs took)" in said(busy).summary
    assert said(ready(queued=0.01), busy_share=0.6).status == "warn"
    facts = pipeline(fetch_s=0.03, blocked=0.1)
    facts["fetch"]["items_queued_s"] = 0.02  # of the scheduler: no preprocessing
    parts = {"latency": 0.003, "preprocessing": 0.007, "collate": 0, "unused_features": 0}
    assert find_cause(Pipeline(facts)).parts == pytest.approx(parts)
    assert said(pipeline(fetch_s=0.0002, compute_s=0.0002), least_wait_s=1e-5).status == "warn"


def test_what_explains_under_half_of_the_wait_is_no_cause() -> None:
    little = pipeline(fetch_s=0.03)
    little["fetch"].update(items_s=0.01, items_blocked_s=0.01)
    assert (find_cause(Pipeline(little)).name, find_cause(Pipeline(little)).fix) == ("unknown", None)
    assert "making a batch is only 10 ms of it" in said(little).summary
    assert "sampler" in advice(little)
    little["fetch"].update(items_s=0.02, items_blocked_s=0.02)
    assert find_cause(Pipeline(little)).name == "latency"


def test_the_gain_of_what_was_tried_is_said_with_the_interval_of_its_rounds() -> None:
    told = said(pipeline(fix=tried("workers", 4, 0.0125))).summary
    assert "With num_workers=4 it is 3.2 times as fast (predicted: 4)." in told
    each = [{"before_s": 0.040, "predicted_s": [0.010, 0.008], "after_s": 0.020}, {"before_s": 0.042, "predicted_s": [0.014, None], "after_s": 0.007}]  # fmt: skip
    wide = said(pipeline(fix=tried("workers", 4, 0.0125, rounds=each)))
    assert "it is 3.2 [2 to 6] times as fast (predicted: 4 [3 to 5])." in wide.summary
    assert Pipeline(pipeline(fix=tried("workers", 4, None))).speedups is not None, "a null in JSON"
    vain = pipeline(fix=tried("workers", 4, 0.05, 0.035))
    assert "Tried: num_workers=4; it does not help, 0.8 times" in said(vain).summary
    assert said(rounds(vain, cached_cpu_s=0.002, cached_queued_s=0.008)).status == "not_measured"


@pytest.mark.parametrize(
    ("facts", "words", "absent"),
    [
        (pipeline(blocked=0.1, items_repeat=False), "Items differ from one reading to the next", "cache_dataset"),
        (pipeline(blocked=0.1, items_repeat=True), "cache_dataset", "Items differ"),
        (
            pipeline(blocked=0.1, fix=tried("cache", "items", 0.04)),
            "worker processes",
            "cache_dataset",
        ),  # tried in vain
        (pipeline(workers=1, fix=tried("workers", 4, 0.04)), "what was tried did not help", "Raise num_workers"),
        (by_loader(pipeline(collate=0.9), collate="default"), "__getitems__", "Look into"),
        (by_loader(pipeline(collate=0.9), collate="pad_all"), "Look into pad_all", "__getitems__"),
        (ready(wait_s=0.01), "num_workers=0", "Hand over less"),  # 576 bytes
        (ready(wait_s=0.01) | {"batch_bytes": {"x": 10**6}}, "Hand over less", "cache_dataset"),
    ],
)
def test_advice_fits(facts: dict[str, Any], words: str, absent: str) -> None:
    assert words in advice(facts)
    assert absent not in advice(facts)


def drawn(draw: Any, facts: dict[str, Any] | None = None, **changes: Any) -> Axes:
    ax: Axes = draw(audit(pipeline(**changes) if facts is None else facts), ax=Figure().subplots())
    return ax


def test_bars_add_up_to_the_step_and_to_a_batch() -> None:
    fix = tried("workers", 4, 0.0125)
    for facts, widths in (
        (pipeline(fetch_s=0.03, compute_s=0.01, collate=0.5, fix=fix), [40, 10, 10, 12.5, 30]),
        (rounds(pipeline(fetch_s=0.03, compute_s=0.01), steady_s=0.08, wait_s=0.03, queued_s=0.04), [80, 10, 30]),
    ):
        ax = drawn(wb.input.plot, facts)
        found = [0.0] * len(ax.get_yticklabels())
        for bar in ax.patches:
            found[round(bar.get_y() + bar.get_height() / 2)] += bar.get_width()  # type: ignore[attr-defined]
        assert found == pytest.approx(widths)
        assert ax.get_title(loc="left").startswith("75% of a step")
    assert drawn(wb.input.plot, step="none", compute_s=0.0).get_title(loc="left") == "No step uses the batches"


def test_the_curve_of_workers() -> None:
    lines = {str(line.get_label()): line for line in drawn(wb.input.plot_workers, tried=(1, 2, 4, 8)).lines}
    assert list(lines["knee: 8"].get_xdata()) == [8]
    assert lines["what the step can use"].get_ydata()[0] == pytest.approx(100)
    one = {str(line.get_label()): line for line in drawn(wb.input.plot_workers, workers=2, tried=(1,)).lines}
    assert not any(label.startswith("knee") for label in one), "one point has no bend"
    assert list(one["as it is: 2"].get_xdata()) == [2]
    for draw in (wb.input.plot, wb.input.plot_workers):
        assert why_not_measured(draw(Audit(facts={}, workload="w"), ax=Figure().subplots()))
    assert why_not_measured(drawn(wb.input.plot_workers, tried=()))
