"""Facts of a healthy job, with one thing planted in them: its own verdict changes, and no other."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers.host_facts import EXAMPLES, STEPS, Seen, job, one_pass
from workbench.record.json_values import to_json
from workbench.topics.hosts.diagnose import diagnose_hosts
from workbench.topics.hosts.diagnose_area import AREAS, CLAUSE, host_areas

OK = dict.fromkeys(CLAUSE, "ok")


def statuses(seen: Seen, **settings: Any) -> dict[str, str]:
    return {f.code.removeprefix("hosts."): f.status for f in diagnose_hosts(seen, **settings)}


def ranks(seen: Seen) -> list[dict[str, Any]]:
    return seen.facts["hosts"]["ranks"]


def edited(edit: Callable[[list[dict[str, Any]]], None], world: int = 2) -> Seen:
    seen = copy.deepcopy(job(world))
    edit(ranks(seen))
    return seen


def rows(name: str, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    """Change fields of every row of a table on the last rank."""

    def edit(found: list[dict[str, Any]]) -> None:
        for row in found[-1][name]:
            row |= {key: value(row) if callable(value) else value for key, value in fields.items()}

    return edit


def passes_of(rank: dict[str, Any], trains: bool) -> list[dict[str, Any]]:
    return [p for p in rank["passes"] if p["grad"] == trains]


def same_order(found: list[dict[str, Any]]) -> None:
    for rank in found:
        first, second = passes_of(rank, True)
        second |= {"indices": first["indices"], "epoch": 0}


def overlapping(found: list[dict[str, Any]]) -> None:
    for p in passes_of(found[1], True):
        p["indices"] = [*p["indices"][:-5], *passes_of(found[0], True)[0 if p["pass"] == 0 else 1]["indices"][:5]]


def incomplete(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for p in passes_of(rank, True):
            p["indices"] = [i for i in p["indices"] if i >= 4]


def padded(found: list[dict[str, Any]]) -> None:
    passes_of(found[1], False)[0]["indices"].append(0)


def not_evaluated(found: list[dict[str, Any]]) -> None:
    for rank in found:
        p = passes_of(rank, False)[0]
        p["indices"] = [i for i in p["indices"] if i < 8]


def drawn_alike(found: list[dict[str, Any]]) -> None:
    found[1]["draws"] = copy.deepcopy(found[0]["draws"])


def slow(found: list[dict[str, Any]]) -> None:
    found[1]["times"]["busy_s"] = [2 * t for t in found[1]["times"]["busy_s"]]


def saved_by_all(found: list[dict[str, Any]]) -> None:
    found[1]["files"] = [found[0]["files"][1]]


def logs(*paths: str) -> Callable[[list[dict[str, Any]]], None]:
    """Each host writes a log of its own."""

    def edit(found: list[dict[str, Any]]) -> None:
        for rank, path in zip(found, paths, strict=True):
            rank["files"] = [f for f in rank["files"] if f["kind"] != "log"]
            rank["files"].append({"path": path, "kind": "log", "times": 2, "step": 10})

    return edit


def evaluated_apart(found: list[dict[str, Any]]) -> None:
    for row in found[1]["buffers"]:
        if row["moment"] == "evaluation":
            row |= {"hash": "other", "means": [5.0, 1.0]}


def saved_apart(found: list[dict[str, Any]]) -> None:
    """The other rank saves nothing: what it goes on with tells what it held."""
    for row in found[1]["buffers"]:
        if row["moment"] == "end":
            row |= {"hash": "other", "means": [2.0, 1.0], "variances": [1.0, 2.5]}


PLANTED: dict[str, tuple[str, str, Callable[[list[dict[str, Any]]], None]]] = {
    "another model": ("init_seed", "fail", rows("parameters", hash=lambda row: f"q{row['step']}")),
    "draws alike": ("data_seed", "fail", drawn_alike),
    "same order every epoch": ("set_epoch", "fail", same_order),
    "shares overlap": ("sharding", "fail", overlapping),
    "shares leave some out": ("sharding", "warn", incomplete),
    "two write one log": ("writers", "fail", lambda r: r[1]["files"].append(r[0]["files"][0])),
    "two write logs of their own": ("writers", "warn", logs("/runs/1718/log.csv", "/runs/1720/log.csv")),
    "two write one checkpoint": ("checkpoint_writers", "fail", saved_by_all),
    "padding counted": ("evaluation", "warn", padded),
    "examples not evaluated": ("evaluation", "warn", not_evaluated),
    "own part reported": ("evaluation", "warn", lambda r: [rank["joined"].update(evaluation=[]) for rank in r] and None),
    "statistics apart": ("buffers", "fail", evaluated_apart),
    "statistics apart when saved": ("buffers", "warn", saved_apart),
    "one clips": ("clip", "fail", lambda r: r[1].update(clips=[])),
    "other norm": ("clip", "fail", rows("clips", limit=2.0)),
    "clips its own gradient": ("clip", "fail", rows("gradients", before_clip="own")),
    "slow": ("straggler", "warn", slow),
    "raw module": ("not_wrapped", "fail", lambda r: r[1].update(calls={"wrapped": 0, "raw": STEPS, "other": 0})),
    "own gradients": ("not_wrapped", "fail", rows("gradients", before_clip="own", at_step="own")),
    "parameters drift": ("not_wrapped", "fail", rows("parameters", hash=lambda row: f"p{row['step']}" if row["step"] < 3 else "other")),
}  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_a_healthy_job_is_ok(world: int) -> None:
    assert statuses(job(world)) == OK
    assert host_areas(diagnose_hosts(job(world))) == dict.fromkeys(AREAS, "ok")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_changes_its_own_verdict_alone(name: str) -> None:
    code, status, edit = PLANTED[name]
    assert statuses(edited(edit)) == OK | {code: status}


@pytest.mark.parametrize("name", PLANTED)
def test_and_its_own_area_alone(name: str) -> None:
    code, status, edit = PLANTED[name]
    found = diagnose_hosts(edited(edit))
    area = (
        "checkpointing"
        if name == "statistics apart when saved"
        else next((a for a, names in AREAS.items() if code in names), None)
    )
    expected = dict.fromkeys(AREAS, "ok")
    assert host_areas(found) == (expected if area is None else expected | {area: status})


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_found_is_said_with_number_clause_and_advice(name: str) -> None:
    code, _, edit = PLANTED[name]
    finding = diagnose_hosts(edited(edit))[f"hosts.{code}"]
    assert re.fullmatch(r"P7\.\d", str(finding.clause))
    assert finding.value is not None
    assert finding.evidence
    assert finding.advice
    json.dumps(to_json(finding.to_dict()))


def test_every_code_comes_once_and_in_order() -> None:
    for seen in (job(), Seen({}), Seen({"hosts": {"ranks": []}})):
        assert [f.code for f in diagnose_hosts(seen)] == [f"hosts.{name}" for name in CLAUSE]


def test_nothing_is_said_where_nobody_looked() -> None:
    assert set(statuses(Seen({})).values()) == {"not_measured"}
    assert "workbench hosts" in diagnose_hosts(Seen({}))["hosts.clip"].summary


def test_a_rank_that_is_missing_is_named() -> None:
    seen = job(4)
    del ranks(seen)[2]
    found = diagnose_hosts(seen)
    assert {f.status for f in found} == {"not_measured"}
    assert "rank 2 wrote no facts" in found["hosts.sharding"].summary


def test_one_host_has_nothing_to_be_compared_with() -> None:
    assert set(statuses(job(1)).values()) == {"not_measured"}


def test_without_a_process_group_the_processes_train_alone() -> None:
    seen = edited(lambda r: [rank.update(initialised=False) for rank in r] and None)
    found = diagnose_hosts(seen)
    assert found["hosts.not_wrapped"].status == "fail"
    assert "init_process_group was never called" in found["hosts.not_wrapped"].summary
    assert {f.status for f in found if f.code != "hosts.not_wrapped"} == {"not_measured"}


def bare(found: list[dict[str, Any]]) -> None:
    """A run that did nothing at all."""
    for rank in found:
        rank |= {
            "wrappers": [],
            "calls": {"wrapped": 0, "raw": 0, "other": 0},
            "evaluations": [],
            "parameters": [],
            "gradients": [],
        }
        rank |= {
            "clips": [],
            "times": {"step_s": [], "busy_s": []},
            "buffers": [],
            "passes": [],
            "draws": [],
            "files": [],
            "steps": 0,
        }


def test_a_run_that_did_nothing() -> None:
    silent = {"writers": "ok", "checkpoint_writers": "ok", "clip": "ok"}
    assert statuses(edited(bare)) == dict.fromkeys(CLAUSE, "not_measured") | silent


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_times_that_are_no_numbers(value: float) -> None:
    seen = edited(lambda r: [rank["times"].update(busy_s=[value] * (STEPS - 1)) for rank in r] and None)
    assert statuses(seen)["straggler"] == ("ok" if value == 0 else "not_measured")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_statistics_that_are_no_numbers_are_still_told_apart(value: float | None) -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        for row in found[1]["buffers"]:
            row |= {"hash": "other", "means": [value, 1.0]}

    assert statuses(edited(edit))["buffers"] in ("warn", "fail")


def test_too_few_steps_say_nothing_about_speed() -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        slow(found)
        for rank in found:
            rank["times"] = {name: values[:10] for name, values in rank["times"].items()}

    assert statuses(edited(edit))["straggler"] == "not_measured"
    assert statuses(edited(edit), min_steps=10)["straggler"] == "warn"


def test_a_host_that_is_slow_now_and_then_makes_nobody_wait() -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        busy = found[1]["times"]["busy_s"]
        found[1]["times"]["busy_s"] = [5 * t if k % 3 == 0 else t for k, t in enumerate(busy)]

    assert statuses(edited(edit)) == OK


def test_the_size_of_a_shift_decides_between_warn_and_fail() -> None:
    def apart(by: float) -> Seen:
        def edit(found: list[dict[str, Any]]) -> None:
            for row in found[1]["buffers"]:
                row |= {"hash": "other", "means": [row["means"][0] + by, 1.0]}

        return edited(edit)

    found = diagnose_hosts(apart(0.05))["hosts.buffers"]
    assert (found.status, found.value) == ("warn", pytest.approx(0.05))
    assert statuses(apart(0.9))["buffers"] == "warn"
    assert statuses(apart(1.1))["buffers"] == "fail"
    assert statuses(apart(1e-9))["buffers"] == "ok"  # rounding in another order


def test_rank_0_that_wins_is_named() -> None:
    assert "copies those of rank 0" in diagnose_hosts(edited(evaluated_apart))["hosts.buffers"].summary


def test_parts_cut_off_before_the_loader_are_compared_by_content() -> None:
    """Every host holds a data set of its own, so that positions say nothing: 0 to 19 on both."""

    def cut(found: list[dict[str, Any]], first: int) -> None:
        for rank in found:
            for p in passes_of(rank, True):
                own = range(rank["rank"] * first, rank["rank"] * first + 20)
                p["dataset"] |= {"hash": f"part{rank['rank']}", "length": 20}
                p |= {"indices": list(range(20)), "contents": [f"row{i}" for i in own]}
            rank["draws"] = []

    assert statuses(edited(lambda r: cut(r, 20)))["sharding"] == "ok"
    assert statuses(edited(lambda r: cut(r, 10)))["sharding"] == "fail"

    def hidden(found: list[dict[str, Any]]) -> None:
        draws = [rank["draws"] for rank in found]
        cut(found, 10)
        for rank, drawn in zip(found, draws, strict=True):
            rank["draws"] = drawn

    assert statuses(edited(hidden))["sharding"] == "not_measured"


def test_data_that_show_no_contents_are_told_apart_by_what_comes_out_of_them() -> None:
    def cut(found: list[dict[str, Any]]) -> None:
        for rank in found:
            for p in passes_of(rank, True):
                p["dataset"] |= {"hash": None, "length": 20}
                p |= {"indices": list(range(20)), "contents": [f"row{i + 20 * rank['rank']}" for i in range(20)]}
            rank["draws"] = []

    assert statuses(edited(cut))["sharding"] == "ok"


def test_a_validation_split_of_the_same_data_set_is_not_missing() -> None:
    """`random_split` makes parts of one data set: what is evaluated is not trained on, on purpose."""

    def split(found: list[dict[str, Any]]) -> None:
        incomplete(found)
        for rank in found:
            for p in passes_of(rank, False):
                p["dataset"] = dict(passes_of(rank, True)[0]["dataset"])
                p["indices"], p["levels"] = list(range(rank["rank"], 4, 2)), [[4, "held out"]]

    assert statuses(edited(split)) == OK
    assert f"all {EXAMPLES - 4} examples" in diagnose_hosts(edited(split))["hosts.sharding"].summary

    def named(found: list[dict[str, Any]]) -> None:
        split(found)
        for rank in found:
            for p in passes_of(rank, True):
                p["levels"] = [[EXAMPLES - 4, "training part"]]

    assert f"all {EXAMPLES - 4} examples" in diagnose_hosts(edited(named))["hosts.sharding"].summary


def test_a_part_that_all_hosts_share_is_what_has_to_be_complete() -> None:
    def split(found: list[dict[str, Any]]) -> None:
        incomplete(found)
        for rank in found:
            for p in passes_of(rank, True):
                p["levels"] = [[len(p["indices"]), f"own{rank['rank']}"], [EXAMPLES - 4, "training part"]]

    assert statuses(edited(split)) == OK


def test_drawing_with_replacement_has_no_shares_but_a_seed() -> None:
    def replaced(found: list[dict[str, Any]], seeds: tuple[int, int]) -> None:
        for rank, seed in zip(found, seeds, strict=True):
            rng = np.random.default_rng(seed)
            rank["passes"] = [
                one_pass(rng.integers(0, EXAMPLES, 40).tolist(), (0, 20), sampler="RandomSampler", distributed=False)
            ]

    other, same = edited(lambda r: replaced(r, (0, 1))), edited(lambda r: replaced(r, (0, 0)))
    assert statuses(other)["sharding"] == statuses(same)["sharding"] == "not_measured"
    assert (statuses(other)["data_seed"], statuses(same)["data_seed"]) == ("ok", "fail")


def test_every_host_on_all_data_is_a_matter_of_shares_not_of_seeds() -> None:
    def unsharded(found: list[dict[str, Any]]) -> None:
        for rank in found:
            for p in passes_of(rank, True):
                p |= {
                    "indices": list(np.random.default_rng(p["pass"]).permutation(EXAMPLES).tolist()),
                    "distributed": False,
                }

    found = statuses(edited(unsharded))
    assert found == OK | {"sharding": "fail"}


def test_everybody_may_evaluate_everything_but_has_to_agree() -> None:
    def everything(found: list[dict[str, Any]], apart: float) -> None:
        for rank in found:
            rank["joined"]["evaluation"] = []
            rank["evaluations"] = [{"step": 10, "calls": 1, "output_sum": 1.0 + apart * rank["rank"]}]
            for p in passes_of(rank, False):
                p["indices"] = list(range(10))

    assert statuses(edited(lambda r: everything(r, 0.0))) == OK
    assert statuses(edited(lambda r: everything(r, 0.1))) == OK | {"evaluation": "fail"}


def test_what_is_left_over_may_be_evaluated_by_itself() -> None:
    """A sampler that drops the last examples, and all hosts that evaluate those after it."""

    def left_over(found: list[dict[str, Any]]) -> None:
        not_evaluated(found)
        for rank in found:
            first = passes_of(rank, False)[0]
            rank["passes"].append(first | {"indices": [8, 9], "levels": [[2, "rest"]]})

    assert statuses(edited(left_over)) == OK


def test_what_one_host_looks_at_besides_is_no_evaluation() -> None:
    def besides(found: list[dict[str, Any]]) -> None:
        first = passes_of(found[0], False)[0]
        found[0]["passes"].insert(0, first | {"indices": [0, 1, 2], "steps": [0, 0]})

    assert statuses(edited(besides)) == OK


def test_one_host_may_evaluate_alone() -> None:
    def alone(found: list[dict[str, Any]]) -> None:
        for p in passes_of(found[0], False):
            p["indices"] = list(range(10))
        found[1]["passes"] = passes_of(found[1], True)
        found[1]["buffers"] = [b for b in found[1]["buffers"] if b["moment"] != "evaluation"]
        found[1]["evaluations"] = []

    assert statuses(edited(alone)) == OK


def test_parameters_sharded_by_design_are_no_alarm() -> None:
    def sharded(found: list[dict[str, Any]]) -> None:
        for rank in found:
            rank["wrappers"] = [{"kind": "FSDPModule", "sharded": True}]
            for name in ("parameters", "gradients"):
                for row in rank[name]:
                    row |= {
                        key: f"{row[key]}{rank['rank']}" for key in ("hash", "before_clip", "at_step") if key in row
                    }
            rank["files"].append(
                {"path": f"/runs/__{rank['rank']}_0.distcp", "kind": "checkpoint", "times": 1, "step": 20}
            )

    found = statuses(edited(sharded))
    assert found == OK | {"init_seed": "not_measured"}


def test_a_seed_that_differs_before_the_wrapper_sends_parameters_around_is_told_and_no_alarm() -> None:
    seen = edited(lambda r: r[1]["wrappers"][0].update(before="other"))
    assert statuses(seen) == OK
    assert "differed before the wrapper" in diagnose_hosts(seen)["hosts.init_seed"].summary


@pytest.mark.parametrize(
    ("change_passes", "status"),
    [
        ({"set_epoch_calls": 1}, "ok"),
        ({"set_epoch_calls": 0}, "not_measured"),
        ({"set_epoch_calls": 0, "shuffles": False}, "ok"),
        ({"set_epoch_calls": 0, "distributed": False}, "ok"),
    ],
)
def test_a_single_epoch_shows_whether_set_epoch_is_called(change_passes: dict[str, Any], status: str) -> None:
    def short(found: list[dict[str, Any]]) -> None:
        for rank in found:
            rank["passes"] = [p | change_passes for p in rank["passes"][:2]]

    assert statuses(edited(short)) == OK | {"set_epoch": status}


def test_a_run_too_short_for_an_epoch_is_judged_by_the_samplers_plan() -> None:
    def short(found: list[dict[str, Any]], plan: bool) -> None:
        for rank in found:
            first = rank["passes"][0]
            rank["passes"] = [
                first
                | {
                    "planned": first["indices"] if plan else None,
                    "indices": first["indices"][:6],
                    "exhausted": False,
                    "steps": [0, 3],
                }
            ]

    planned, unplanned = (
        diagnose_hosts(edited(lambda r, plan=plan: short(r, plan)))["hosts.sharding"] for plan in (True, False)
    )
    assert (planned.status, unplanned.status) == ("ok", "ok")
    assert "all 40 examples" in planned.summary
    assert "not to be seen" in unplanned.summary


def test_lines_that_all_hosts_print_are_a_log() -> None:
    lines = [f"step {k}: loss 0.{k}" for k in range(5)]
    assert statuses(job(printed={"0": lines, "1": lines})) == OK | {"writers": "warn"}
    assert statuses(job(printed={"0": lines, "1": []})) == OK
    tagged = [f"rank {{}}: step {k}" for k in range(5)]
    assert statuses(job(printed={str(r): [line.format(r) for line in tagged] for r in range(2)})) == OK


def test_more_hosts_than_cores_is_said_where_times_are() -> None:
    seen = edited(lambda r: [rank.update(host="one", cores=1) for rank in r] and None)
    assert "2 hosts share 1 cores" in diagnose_hosts(seen)["hosts.straggler"].summary


def test_thresholds_are_arguments() -> None:
    assert statuses(edited(slow), straggler_ratio=3.0) == OK
    assert statuses(edited(slow), straggler_share=1.1) == OK
    assert diagnose_hosts(edited(slow))["hosts.straggler"].threshold == 0.75
    assert statuses(edited(evaluated_apart), large_shift=10.0) == OK | {"buffers": "warn"}
