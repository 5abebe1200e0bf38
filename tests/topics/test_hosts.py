"""Verdicts on hosts: facts of a healthy job with one thing planted in them change its own verdict, and no other; right jobs of other kinds change none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.helpers.host_facts import EXAMPLES, STEPS, Seen, job, one_pass
from workbench.findings.finding import Finding
from workbench.record.json_values import to_json
from workbench.topics.hosts.diagnose import AREAS
from workbench.topics.hosts.diagnose_update import CODES

Ranks = list[dict[str, Any]]
Edit = Callable[[Ranks], Any]
NAMES = [code.removeprefix("hosts.") for code in CODES]
OK = dict.fromkeys(NAMES, "ok")


def statuses(seen: Seen, **settings: Any) -> dict[str, str]:
    return {f.code.removeprefix("hosts."): f.status for f in wb.hosts.diagnose(seen, **settings)}


def ranks(seen: Seen) -> Ranks:
    return seen.facts["hosts"]["ranks"]  # type: ignore[no-any-return]


def edited(edit: Edit, world: int = 2) -> Seen:
    seen = copy.deepcopy(job(world))
    edit(ranks(seen))
    return seen


def finding(edit: Edit, code: str, world: int = 2) -> Finding:
    return wb.hosts.diagnose(edited(edit, world))[f"hosts.{code}"]


def rows(name: str, **fields: Any) -> Edit:
    """Change fields of every row of a table on the last rank."""

    def edit(found: Ranks) -> None:
        for row in found[-1][name]:
            row |= {key: value(row) if callable(value) else value for key, value in fields.items()}

    return edit


def passes_of(rank: dict[str, Any], trains: bool) -> Ranks:
    return [p for p in rank["passes"] if p["grad"] == trains]


def trained(found: Ranks) -> Ranks:
    return [p for rank in found for p in passes_of(rank, True)]


def without(found: Ranks, gone: Callable[[int], bool]) -> None:
    for p in trained(found):
        p["indices"] = [i for i in p["indices"] if not gone(i)]


def files(kind: str, *paths: str) -> Edit:
    """Each rank writes a file of its own."""

    def edit(found: Ranks) -> None:
        for rank, path in zip(found, paths, strict=True):
            rank["files"] = [f for f in rank["files"] if f["kind"] != kind]
            rank["files"].append({"path": path, "kind": kind, "times": 2, "step": 10})

    return edit


def statistics(means: Any, *moments: str, **fields: Any) -> Edit:
    def edit(found: Ranks) -> None:
        for row in found[1]["buffers"]:
            if not moments or row["moment"] in moments:
                row |= {"hash": "other", "means": means(row["means"]) if callable(means) else means, **fields}

    return edit


def timed(*busy: list[float]) -> Edit:
    """What each rank is busy in each step, in seconds."""

    def edit(found: Ranks) -> None:
        for rank, times in zip(found, busy, strict=True):
            rank["times"] = {"busy_s": times, "step_s": [max(step) for step in zip(*busy, strict=True)]}

    return edit


def gradients(**fields: Callable[[int, int], str | None]) -> Edit:
    """No clipping by torch; what a gradient is on a rank before an update, at each place."""

    def edit(found: Ranks) -> None:
        for rank in found:
            rank["clips"] = []
            for row in rank["gradients"]:
                row |= {name: value(row["step"], rank["rank"]) for name, value in fields.items()}

    return edit


def same_order(found: Ranks) -> None:
    for rank in found:
        first, second = passes_of(rank, True)
        second |= {"indices": first["indices"], "epoch": 0}


def overlapping(found: Ranks) -> None:
    for p, other in zip(passes_of(found[1], True), passes_of(found[0], True), strict=True):
        p["indices"] = [*p["indices"][:-5], *other["indices"][:5]]


def padded(found: Ranks) -> None:
    passes_of(found[1], False)[0]["indices"].append(0)


def not_evaluated(found: Ranks) -> None:
    for p in (passes_of(rank, False)[0] for rank in found):
        p["indices"] = [i for i in p["indices"] if i < 8]


def slow(found: Ranks) -> None:
    found[1]["times"]["busy_s"] = [2 * t for t in found[1]["times"]["busy_s"]]


def each(**fields: Any) -> Edit:
    return lambda found: [rank.update(copy.deepcopy(fields)) for rank in found]


def no_join(found: Ranks) -> None:
    for rank in found:
        rank["joined"]["evaluation"] = []


EVALUATED_APART, SAVED_APART = statistics([5.0, 1.0], "evaluation"), statistics([2.0, 1.0], "end", variances=[1.0, 2.5])
PLANTED: dict[str, tuple[str, str, Edit]] = {
    "another model": ("init_seed", "fail", rows("parameters", hash=lambda row: f"q{row['step']}")),
    "draws alike": ("data_seed", "fail", lambda r: r[1].update(draws=copy.deepcopy(r[0]["draws"]))),
    "one draw in common": ("data_seed", "fail", lambda r: r[1]["draws"][3].update(state=r[0]["draws"][5]["state"])),
    "same order every epoch": ("set_epoch", "fail", same_order),
    "shares overlap": ("sharding", "fail", overlapping),
    "shares leave some out": ("sharding", "warn", lambda r: without(r, lambda i: i < 4)),
    "two write one log": ("writers", "fail", lambda r: r[1]["files"].append(r[0]["files"][0])),
    "two write one checkpoint": ("checkpoint_writers", "fail", lambda r: r[1].update(files=[r[0]["files"][1]])),
    "checkpoints by rank": ("checkpoint_writers", "warn", files("checkpoint", "/runs/last0.pt", "/runs/last1.pt")),
    "padding counted": ("evaluation", "warn", padded),
    "examples not evaluated": ("evaluation", "warn", not_evaluated),
    "own part reported": ("evaluation", "warn", no_join),
    "statistics apart": ("buffers", "fail", EVALUATED_APART),
    "statistics a little apart": ("buffers", "warn", statistics(lambda m: [m[0] + 1e-4, 1.0])),
    "statistics apart when saved": ("buffers", "warn", SAVED_APART),
    "one clips": ("clip", "fail", lambda r: r[1].update(clips=[])),
    "other norm": ("clip", "fail", rows("clips", limit=2.0)),
    "clips its own gradient": ("clip", "fail", rows("gradients", before_clip="own")),
    "slow": ("straggler", "warn", slow),
    "raw module": ("not_wrapped", "fail", lambda r: r[1].update(calls={"wrapped": 0, "raw": STEPS, "other": 0})),
    "own gradients": ("not_wrapped", "fail", rows("gradients", before_clip="own", at_step="own")),
    "parameters drift": ("not_wrapped", "fail", rows("parameters", hash=lambda row: f"p{row['step']}" if row["step"] < 3 else "other")),
    "one stays out of the group": ("not_wrapped", "fail", lambda r: r[1].update(initialised=False)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_changes_its_own_verdict_and_its_own_area_alone(name: str) -> None:
    code, status, edit = PLANTED[name]
    found = wb.hosts.diagnose(edited(edit))
    assert {f.code.removeprefix("hosts."): f.status for f in found} == OK | {code: status}
    area = next((area for area, names in AREAS.items() if code in names), None)
    area = "checkpointing" if name == "statistics apart when saved" else area
    assert wb.hosts.areas(found) == dict.fromkeys(AREAS, "ok") | ({area: status} if area else {})
    planted = found[f"hosts.{code}"]
    assert planted.value is not None
    assert planted.clause == CODES[planted.code]
    assert planted.evidence
    assert planted.advice
    json.dumps(to_json(planted.to_dict()))


@pytest.mark.parametrize("world", [2, 4])
def test_a_healthy_job_is_ok(world: int) -> None:
    assert statuses(job(world)) == OK
    assert wb.hosts.areas(wb.hosts.diagnose(job(world))) == dict.fromkeys(AREAS, "ok")


def missing_rank(seen: Seen) -> None:
    del ranks(seen)[2]


NOTHING = {"clips": [], "times": {"step_s": [], "busy_s": []}, "buffers": [], "passes": [], "draws": [], "files": [], "steps": 0,
           "wrappers": [], "calls": {"wrapped": 0, "raw": 0, "other": 0}, "evaluations": [], "parameters": [], "gradients": []}  # fmt: skip


def test_what_was_not_seen_is_not_measured_and_says_why() -> None:
    four = copy.deepcopy(job(4))
    missing_rank(four)
    spawned = edited(lambda r: r.pop() and r[0].update(initialised=False, spawned=2))
    for seen, said in (
        (Seen({}), "workbench hosts"), (Seen({"hosts": {"ranks": []}}), "there is one rank only"), (job(1), "one rank only"),
        (four, "rank 2 wrote no facts"), (spawned, "wb.hosts.audit()"),
    ):  # fmt: skip
        found = wb.hosts.diagnose(seen)
        assert [f.code for f in found] == list(CODES)
        assert {f.status for f in found} == {"not_measured"}
        assert said in found["hosts.sharding"].summary
    silent = {"writers": "ok", "checkpoint_writers": "ok", "clip": "ok"}
    assert statuses(edited(each(**NOTHING))) == dict.fromkeys(NAMES, "not_measured") | silent
    alone = wb.hosts.diagnose(edited(each(initialised=False)))
    assert alone["hosts.not_wrapped"].status == "fail"
    assert "init_process_group was never called" in alone["hosts.not_wrapped"].summary
    assert {f.status for f in alone if f.code != "hosts.not_wrapped"} == {"not_measured"}


# Updates.


def shared(step: int, rank: int) -> str:
    return f"shared {step}"


def own(step: int, rank: int) -> str:
    return f"own {step} {rank}"


def clipped(step: int, rank: int) -> str:
    return f"clipped {step}"


def nothing(step: int, rank: int) -> None:
    return None


def apart_from_4(step: int, rank: int) -> str:
    return f"clipped {step} {rank if step >= 4 else 0}"


@pytest.mark.parametrize(
    ("after_backward", "at_joining", "at_step", "clip", "not_wrapped"),
    [
        (shared, nothing, shared, "ok", "ok"),  # a wrapper
        (shared, nothing, clipped, "ok", "ok"),  # and a clipping of the script's own, on every host
        (shared, nothing, apart_from_4, "fail", "ok"),  # and on some hosts only
        (own, own, shared, "ok", "ok"),  # averaged by the script
        (own, clipped, shared, "not_measured", "ok"),  # changed before: clipped, or divided by the number of hosts
        (own, nothing, shared, "not_measured", "ok"),  # averaged in a way that is not to be seen
        (own, nothing, own, "ok", "fail"),  # not averaged
        (nothing, nothing, shared, "ok", "ok"),  # the trainer's own
    ],
)
def test_gradients_tell_of_a_clipping_that_torch_does_not_do(
    after_backward: Any, at_joining: Any, at_step: Any, clip: str, not_wrapped: str
) -> None:
    edit = gradients(after_backward=after_backward, at_joining=at_joining, at_step=at_step, before_clip=at_step)
    assert statuses(edited(edit)) == OK | {"clip": clip, "not_wrapped": not_wrapped}
    if at_step is apart_from_4:
        assert finding(edit, "clip").step == 4


def uneven(found: Ranks) -> None:
    """The second host has data for eight updates in each epoch, the first for ten: after these, update k is not update k."""
    last = found[1]
    last["steps"] = 16
    last["clips"] = last["clips"][:16]
    for one, steps in zip(passes_of(last, True), ([0, 8], [8, 16]), strict=True):
        one["steps"] = steps
    for name in ("parameters", "gradients"):
        for row in last[name]:
            if row["step"] >= 8:
                row |= {key: f"later {value}" for key, value in row.items() if isinstance(value, str)}


@pytest.mark.parametrize(
    ("also", "expected"),
    [
        (lambda r: None, {}),
        (lambda r: r[1].update(clips=r[1]["clips"][:5]), {"clip": "fail"}),
        (rows("gradients", before_clip="own", at_step="own"), {"not_wrapped": "fail"}),
    ],
)
def test_hosts_with_more_data_than_others_are_compared_while_all_have_some(
    also: Edit, expected: dict[str, str]
) -> None:
    assert statuses(edited(lambda r: (uneven(r), also(r)))) == OK | expected


def test_the_first_optimizer_that_is_used_shows_the_initial_parameters() -> None:
    def second(found: Ranks, apart: bool) -> None:
        for rank in found:
            for row in (*rank["parameters"], *rank["gradients"]):
                row["optimizer"] = 1
            rank["parameters"][0]["hash"] += str(rank["rank"]) * apart
            rank["parameters"] = rank["parameters"][:1] if apart else rank["parameters"]

    assert statuses(edited(lambda r: second(r, False))) == OK
    assert statuses(edited(lambda r: second(r, True))) == OK | {"init_seed": "fail"}
    sent = edited(lambda r: r[1]["wrappers"][0].update(before="other"))
    assert statuses(sent) == OK
    assert "differed before the wrapper" in wb.hosts.diagnose(sent)["hosts.init_seed"].summary


def test_parameters_sharded_by_design_are_no_alarm() -> None:
    def sharded(found: Ranks) -> None:
        for rank in found:
            rank["wrappers"] = [{"kind": "FSDPModule", "sharded": True}]
            for row in (*rank["parameters"], *rank["gradients"]):
                row |= {key: f"{row[key]}{rank['rank']}" for key in ("hash", "before_clip", "at_step") if key in row}
            path = f"/runs/__{rank['rank']}_0.distcp"
            rank["files"].append({"path": path, "kind": "checkpoint", "times": 1, "step": 20})

    assert statuses(edited(sharded)) == OK | {"init_seed": "not_measured"}


@pytest.mark.parametrize(("slow_steps", "status"), [(0, "ok"), (14, "ok"), (15, "warn"), (20, "warn")])
def test_a_straggler_is_busy_half_as_long_again_in_three_of_four_steps(slow_steps: int, status: str) -> None:
    """A moment in which the whole machine is slow, the same step on all hosts, makes none of them a straggler."""
    machine = [0.01 * (1 + 5 * (k % 3 == 0)) for k in range(20)]
    late = [t * (2.0 if k < slow_steps else 0.9) for k, t in enumerate(machine)]
    found = finding(timed(machine, late), "straggler")
    assert (found.status, found.value) == (status, slow_steps / 20)
    assert found.evidence["late_share"] == {0: 0.0, 1: slow_steps / 20}


def test_times_that_are_few_or_no_numbers_or_shared_say_so() -> None:
    for value, status in ((float("nan"), "not_measured"), (float("inf"), "not_measured"), (0.0, "ok")):
        assert (
            finding(lambda r, v=value: [x["times"].update(busy_s=[v] * (STEPS - 1)) for x in r], "straggler").status
            == status
        )  # type: ignore[misc]

    def short(found: Ranks) -> None:
        slow(found)
        for rank in found:
            rank["times"] = {name: values[:10] for name, values in rank["times"].items()}

    assert statuses(edited(short))["straggler"] == "not_measured"
    assert statuses(edited(short), min_steps=10)["straggler"] == "warn"
    assert "2 ranks share 1 cores" in finding(each(host="one", cores=1), "straggler").summary


def test_thresholds_are_arguments() -> None:
    assert statuses(edited(slow), straggler_ratio=3.0) == OK
    assert statuses(edited(slow), straggler_share=1.1) == OK
    assert statuses(edited(EVALUATED_APART), large_shift=10.0) == OK | {"buffers": "warn"}


# Data.


def cut(first: int, *, drawn: bool = False, hashes: bool = True) -> Edit:
    """Every host holds a data set of its own, so that positions say nothing: 0 to 19 on both."""

    def edit(found: Ranks) -> None:
        for rank in found:
            for p in passes_of(rank, True):
                rows_of = range(rank["rank"] * first, rank["rank"] * first + 20)
                p["dataset"] |= {"hash": f"part{rank['rank']}" if hashes else None, "length": 20}
                p |= {"indices": list(range(20)), "contents": [f"row{i}" for i in rows_of]}
            rank["draws"] = rank["draws"] if drawn else []

    return edit


def streamed(alike: bool) -> Edit:
    """Contents are written down in the first pass alone."""

    def edit(found: Ranks) -> None:
        for p in trained(found):
            contents = [f"row {i}" for i in (range(20) if alike else p["indices"])]
            p["dataset"] |= {"stream": True, "hash": None, "length": None}
            p |= {"indices": [], "contents": contents if p["pass"] == 0 else [], "distributed": False}
        each(draws=[])(found)

    return edit


@pytest.mark.parametrize(
    ("edit", "status"),
    [
        (cut(20), "ok"), (cut(10), "fail"), (cut(10, drawn=True), "not_measured"), (cut(20, hashes=False), "ok"),
        (streamed(False), "ok"), (streamed(True), "fail"),
    ],
)  # fmt: skip
def test_parts_without_positions_in_common_are_compared_by_content(edit: Edit, status: str) -> None:
    assert statuses(edited(edit))["sharding"] == status


def test_a_validation_split_of_the_same_data_set_is_not_missing() -> None:
    """`random_split` makes parts of one data set: what is evaluated is not trained on, on purpose."""

    def split(found: Ranks) -> None:
        without(found, lambda i: i < 4)
        for rank in found:
            for p in passes_of(rank, False):
                p["dataset"] = dict(passes_of(rank, True)[0]["dataset"])
                p["indices"], p["levels"] = list(range(rank["rank"], 4, 2)), [[4, "held out"]]

    def shared_part(found: Ranks) -> None:
        without(found, lambda i: i < 4)
        for rank in found:
            for p in passes_of(rank, True):
                p["levels"] = [[len(p["indices"]), f"own{rank['rank']}"], [EXAMPLES - 4, "training part"]]

    for edit in (split, shared_part):
        assert statuses(edited(edit)) == OK
        assert f"all {EXAMPLES - 4} examples" in finding(edit, "sharding").summary

    def some_share(found: Ranks) -> None:
        without(found, lambda i: i < 12)
        for rank in found:
            for p in passes_of(rank, True):
                p["levels"] = [[28, f"own {rank['rank'] // 2}"]]

    assert statuses(edited(some_share, world=4)) == OK | {"sharding": "warn"}


@pytest.mark.parametrize(
    ("left_out", "again", "status"), [(3, True, "ok"), (4, True, "warn"), (6, True, "warn"), (6, False, "ok")]
)
def test_less_than_a_batch_of_all_hosts_may_be_left_out_and_more_if_they_come_in_another_epoch(
    left_out: int, again: bool, status: str
) -> None:
    """Two hosts with batches of two."""

    def edit(found: Ranks) -> None:
        for p in trained(found):
            gone = range(left_out) if again or p["pass"] == 0 else range(EXAMPLES - left_out, EXAMPLES)
            p["indices"] = [i for i in p["indices"] if i not in gone]

    assert statuses(edited(edit)) == OK | {"sharding": status}


@pytest.mark.parametrize(("twice", "status"), [(3, "ok"), (4, "fail")])
def test_as_many_examples_may_be_on_two_hosts_as_a_sampler_pads(twice: int, status: str) -> None:
    """Four hosts: at most three examples make their shares equally long."""

    def edit(found: Ranks) -> None:
        for number in range(twice):
            for p, first in zip(passes_of(found[1 + number % 3], True), passes_of(found[0], True), strict=True):
                p["indices"] = [*p["indices"], first["indices"][number]]

    assert statuses(edited(edit, world=4)) == OK | {"sharding": status}


def test_drawing_with_replacement_has_no_shares_but_a_seed() -> None:
    def replaced(*seeds: int) -> dict[str, str]:
        def edit(found: Ranks) -> None:
            for rank, seed in zip(found, seeds, strict=True):
                drawn = np.random.default_rng(seed).integers(0, EXAMPLES, 40).tolist()
                rank["passes"] = [one_pass(drawn, (0, 20), sampler="RandomSampler", distributed=False)]

        return statuses(edited(edit))

    assert replaced(0, 1)["sharding"] == replaced(0, 0)["sharding"] == "not_measured"
    assert (replaced(0, 1)["data_seed"], replaced(0, 0)["data_seed"]) == ("ok", "fail")
    repeated = edited(lambda r: [p["indices"].append(p["indices"][0]) for p in passes_of(r[0], True)])
    assert statuses(repeated) == OK, "an example that comes twice on one host is padding"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"set_epoch_calls": 1}, "ok"),
        ({"set_epoch_calls": 0}, "not_measured"),
        ({"set_epoch_calls": 0, "shuffles": False}, "ok"),
        ({"set_epoch_calls": 0, "distributed": False}, "ok"),
    ],
)
def test_a_single_epoch_shows_whether_set_epoch_is_called(changes: dict[str, Any], status: str) -> None:
    def short(found: Ranks) -> None:
        for rank in found:
            rank["passes"] = [p | changes for p in rank["passes"][:2]]

    assert statuses(edited(short)) == OK | {"set_epoch": status}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"loader": 7}, "fail"),  # a new loader for each epoch
        ({"loader": 7, "optimizers": 2}, "ok"),  # another training
        ({"loader": 7, "steps": [0, 10]}, "ok"),  # beside the other, in the same steps
    ],
)
def test_the_epochs_of_new_loaders_follow_each_other(changes: dict[str, Any], status: str) -> None:
    def edit(found: Ranks) -> None:
        for rank in found:
            first, second = passes_of(rank, True)
            for p in (first, second):
                p |= {"optimizers": 1, "set_epoch_calls": 1}
            second |= {"indices": first["indices"], "pass": 0} | changes

    assert statuses(edited(edit)) == OK | {"set_epoch": status}


def test_a_run_too_short_for_an_epoch_is_judged_by_the_samplers_plan() -> None:
    def short(plan: bool) -> Edit:
        def edit(found: Ranks) -> None:
            for rank in found:
                p = rank["passes"][0]
                p |= {
                    "planned": p["indices"] if plan else None,
                    "indices": p["indices"][:6],
                    "exhausted": False,
                    "steps": [0, 3],
                }
                rank["passes"] = [p]

        return edit

    assert "all 40 examples" in finding(short(True), "sharding").summary
    assert "not to be seen" in finding(short(False), "sharding").summary


# Evaluation, statistics, files.


def left_over(found: Ranks) -> None:
    """A sampler that drops the last examples, and all hosts that evaluate those after it."""
    not_evaluated(found)
    for rank in found:
        rank["passes"].append(passes_of(rank, False)[0] | {"indices": [8, 9], "levels": [[2, "rest"]]})


def besides(found: Ranks) -> None:
    """What one host looks at besides is no evaluation."""
    found[0]["passes"].insert(0, passes_of(found[0], False)[0] | {"indices": [0, 1, 2], "steps": [0, 0]})


def one_evaluates(found: Ranks) -> None:
    for p in passes_of(found[0], False):
        p["indices"] = list(range(10))
    found[1]["passes"] = passes_of(found[1], True)
    found[1]["buffers"] = [b for b in found[1]["buffers"] if b["moment"] != "evaluation"]
    found[1]["evaluations"] = []


@pytest.mark.parametrize("edit", [left_over, besides, one_evaluates])
def test_right_ways_to_evaluate_are_ok(edit: Edit) -> None:
    assert statuses(edited(edit)) == OK


@pytest.mark.parametrize(
    ("sums", "size", "status"),
    [
        ((1.0, 1.0), None, "ok"),
        ((1.0, 1.1), None, "fail"),
        (("-inf", "-inf"), "inf", "ok"),  # masked outputs, as JSON has them
        (("-inf", 1.0), "inf", "fail"),
        ((None, None), None, "ok"),  # NaN
        ((1e-3, 1.1e-3), 1e4, "ok"),  # what is left of large outputs of both signs
        ((1e-3, 1.1e-3), 1.0, "fail"),
    ],
)
def test_everybody_may_evaluate_everything_but_has_to_agree(sums: tuple[Any, Any], size: Any, status: str) -> None:
    def edit(found: Ranks) -> None:
        for rank, total in zip(found, sums, strict=True):
            rank["joined"]["evaluation"] = []
            rank["evaluations"] = [{"step": 10, "calls": 1, "output_sum": total, "output_size": size}]
            for p in passes_of(rank, False):
                p["indices"] = list(range(10))

    assert statuses(edited(edit)) == OK | {"evaluation": status}


def test_parts_that_nobody_joins_are_named_before_a_padding_that_matters_less() -> None:
    found = finding(lambda r: (padded(r), no_join(r)), "evaluation")
    assert found.summary.startswith("Each rank evaluates its own part, and no collective joins them")
    assert "1 of 10 are on two ranks" in found.summary
    assert [line.split()[0] for line in found.advice] == ["Join", "Evaluate", "DistributedSampler"]


def test_the_size_of_a_shift_decides_between_warn_and_fail() -> None:
    for by, status in ((1e-9, "ok"), (0.05, "warn"), (0.9, "warn"), (1.1, "fail")):  # the first is rounding
        found = finding(statistics(lambda m, by=by: [m[0] + by, 1.0]), "buffers")
        assert found.status == status
        assert found.value == pytest.approx(by if status != "ok" else 0.0)
    for value in (float("nan"), float("inf"), None):
        assert finding(statistics([value, 1.0]), "buffers").status in ("warn", "fail")
    assert "copies those of rank 0" in finding(EVALUATED_APART, "buffers").summary


@pytest.mark.parametrize(
    ("paths", "status"),
    [
        (("/runs/rank0.log", "/runs/rank1.log"), "ok"),
        (("/runs/7/log0.csv", "/runs/7/log1.csv"), "ok"),
        (("/runs/version_0/log.csv", "/runs/version_1/log.csv"), "warn"),  # counted up by a program, and not by rank
        (("/runs/rank1.log", "/runs/rank0.log"), "warn"),
        (("/runs/events.1718.40", "/runs/events.1718.41"), "warn"),
    ],
)
def test_logs_named_by_the_rank_are_deliberate_and_those_of_a_time_or_a_process_are_not(
    paths: tuple[str, str], status: str
) -> None:
    assert statuses(edited(files("log", *paths))) == OK | {"writers": status}
    found = finding(files("log", *paths), "writers")
    assert ("named by the rank" in found.summary) == (found.value == 1) == (status == "ok")


def test_lines_that_all_hosts_print_are_a_log() -> None:
    lines = [f"step {k}: loss 0.{k}" for k in range(5)]
    assert statuses(job(printed={"0": lines, "1": lines})) == OK | {"writers": "warn"}
    assert statuses(job(printed={"0": lines, "1": []})) == OK
    tagged = {str(r): [f"rank {r}: step {k}" for k in range(5)] for r in range(2)}
    assert statuses(job(printed=tagged)) == OK
