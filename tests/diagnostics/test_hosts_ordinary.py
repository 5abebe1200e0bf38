"""Facts of right jobs of other kinds: clipping by hand, uneven inputs, streams, new loaders, outputs that are no numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.diagnostics.test_hosts import OK, edited, logs, padded, passes_of, statuses
from tests.helpers.host_facts import EXAMPLES
from workbench.record.json_values import to_json
from workbench.topics.hosts.diagnose import diagnose_hosts

Edit = Callable[[list[dict[str, Any]]], None]


def gradients(**fields: Callable[[int, int], str | None]) -> Edit:
    """No clipping by torch; what a gradient is on a rank before an update, at each place."""

    def edit(found: list[dict[str, Any]]) -> None:
        for rank in found:
            rank["clips"] = []
            for row in rank["gradients"]:
                row |= {name: value(row["step"], rank["rank"]) for name, value in fields.items()}

    return edit


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


def test_the_update_from_which_some_hosts_clip_is_named_and_what_follows_from_it_is_not_blamed_on_the_wrapper() -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        gradients(after_backward=shared, at_joining=nothing, at_step=apart_from_4, before_clip=apart_from_4)(found)
        for row in found[1]["parameters"]:
            row["hash"] += " apart" * (row["step"] > 4)

    found = diagnose_hosts(edited(edit))
    assert (found["hosts.clip"].status, found["hosts.clip"].step) == ("fail", 4)
    assert found["hosts.not_wrapped"].status == "ok"
    assert found["hosts.clip"].advice
    json.dumps(to_json(found.to_dict()))


@pytest.mark.parametrize("limit", ["inf", float("inf")])
def test_a_norm_that_nothing_exceeds_is_only_measured(limit: Any) -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        measured = [{**clip, "limit": limit} for clip in found[0]["clips"]]
        found[0]["clips"] = [row for pair in zip(measured, found[0]["clips"], strict=True) for row in pair]

    def alone(found: list[dict[str, Any]]) -> None:
        edit(found)
        for rank in found:
            rank["clips"] = [c for c in rank["clips"] if c["limit"] == limit]

    assert statuses(edited(edit)) == OK
    assert statuses(edited(alone)) == OK


def uneven(found: list[dict[str, Any]]) -> None:
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


def test_hosts_with_more_data_than_others_are_compared_while_all_have_some() -> None:
    assert statuses(edited(uneven)) == OK

    def and_unclipped(found: list[dict[str, Any]]) -> None:
        uneven(found)
        found[1]["clips"] = found[1]["clips"][:5]

    assert statuses(edited(and_unclipped)) == OK | {"clip": "fail"}

    def and_not_averaged(found: list[dict[str, Any]]) -> None:
        uneven(found)
        for row in found[1]["gradients"]:
            row |= {"before_clip": "own", "at_step": "own"}

    assert statuses(edited(and_not_averaged)) == OK | {"not_wrapped": "fail"}


def test_the_first_optimizer_that_is_used_shows_the_initial_parameters() -> None:
    def second(found: list[dict[str, Any]], apart: bool) -> None:
        for rank in found:
            for name in ("parameters", "gradients"):
                for row in rank[name]:
                    row["optimizer"] = 1
            rank["parameters"][0]["hash"] += str(rank["rank"]) * apart
            rank["parameters"] = rank["parameters"][:1] if apart else rank["parameters"]

    assert statuses(edited(lambda r: second(r, False))) == OK
    assert statuses(edited(lambda r: second(r, True))) == OK | {"init_seed": "fail"}


def streamed(found: list[dict[str, Any]], *, alike: bool) -> None:
    """Contents are written down in the first pass alone."""
    for rank in found:
        rank["draws"] = []
        for p in passes_of(rank, True):
            contents = [f"row {i}" for i in (range(20) if alike else p["indices"])]
            p["dataset"] |= {"stream": True, "hash": None, "length": None}
            p |= {"indices": [], "contents": contents if p["pass"] == 0 else [], "distributed": False}


def test_a_stream_is_compared_by_the_pass_whose_contents_are_known() -> None:
    assert statuses(edited(lambda r: streamed(r, alike=False))) == OK
    assert statuses(edited(lambda r: streamed(r, alike=True))) == OK | {"sharding": "fail"}


@pytest.mark.parametrize(
    ("left_out", "again", "status"),
    [(3, True, "ok"), (4, True, "warn"), (6, True, "warn"), (6, False, "ok")],
)
def test_less_than_a_batch_of_all_hosts_may_be_left_out_and_more_if_they_come_in_another_epoch(
    left_out: int, again: bool, status: str
) -> None:
    """Two hosts with batches of two."""

    def edit(found: list[dict[str, Any]]) -> None:
        for rank in found:
            for p in passes_of(rank, True):
                gone = range(left_out) if again or p["pass"] == 0 else range(EXAMPLES - left_out, EXAMPLES)
                p["indices"] = [i for i in p["indices"] if i not in gone]

    assert statuses(edited(edit)) == OK | {"sharding": status}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"loader": 7}, "fail"),  # a new loader for each epoch
        ({"loader": 7, "optimizers": 2}, "ok"),  # another training
        ({"loader": 7, "steps": [0, 10]}, "ok"),  # beside the other, in the same steps
    ],
)
def test_the_epochs_of_new_loaders_follow_each_other(changes: dict[str, Any], status: str) -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        for rank in found:
            first, second = passes_of(rank, True)
            for p in (first, second):
                p |= {"optimizers": 1, "set_epoch_calls": 1}
            second |= {"indices": first["indices"], "pass": 0} | changes

    assert statuses(edited(edit)) == OK | {"set_epoch": status}


def evaluated_everywhere(found: list[dict[str, Any]], sums: tuple[Any, Any], size: Any) -> None:
    for rank, total in zip(found, sums, strict=True):
        rank["joined"]["evaluation"] = []
        rank["evaluations"] = [{"step": 10, "calls": 1, "output_sum": total, "output_size": size}]
        for p in passes_of(rank, False):
            p["indices"] = list(range(10))


@pytest.mark.parametrize(
    ("sums", "size", "status"),
    [
        (("-inf", "-inf"), "inf", "ok"),  # masked outputs, as JSON has them
        (("-inf", 1.0), "inf", "fail"),
        ((None, None), None, "ok"),  # NaN
        ((1e-3, 1.1e-3), 1e4, "ok"),  # what is left of large outputs of both signs
        ((1e-3, 1.1e-3), 1.0, "fail"),
        ((1e-3, 1.1e-3), None, "fail"),
    ],
)
def test_outputs_of_any_size_are_compared(sums: tuple[Any, Any], size: Any, status: str) -> None:
    assert statuses(edited(lambda r: evaluated_everywhere(r, sums, size))) == OK | {"evaluation": status}


def test_processes_that_the_script_started_itself_are_said_to_be_unseen() -> None:
    seen = edited(lambda r: [rank.update(initialised=False, spawned=2) for rank in r] and None)
    assert "audit_hosts()" in diagnose_hosts(seen)["hosts.sharding"].summary
    assert set(statuses(edited(lambda r: r.pop() and r[0].update(initialised=False, spawned=2))).values()) == {
        "not_measured"
    }


@pytest.mark.parametrize(("twice", "status"), [(3, "ok"), (4, "fail")])
def test_as_many_examples_may_be_on_two_hosts_as_a_sampler_pads(twice: int, status: str) -> None:
    """Four hosts: at most three examples make their shares equally long."""

    def edit(found: list[dict[str, Any]]) -> None:
        for rank in found[1:]:
            for p in passes_of(rank, True):
                first = passes_of(found[0], True)[p["pass"]]["indices"]
                p["indices"] = p["indices"] + ([first[rank["rank"]]] if rank["rank"] < 4 else [])
            if rank["rank"] == 1 and twice == 4:
                for p in passes_of(rank, True):
                    p["indices"].append(passes_of(found[0], True)[p["pass"]]["indices"][0])

    assert statuses(edited(edit, world=4)) == OK | {"sharding": status}


def test_an_example_that_comes_twice_on_one_host_is_padding_and_no_drawing_with_replacement() -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        for p in passes_of(found[0], True):
            p["indices"].append(p["indices"][0])

    assert statuses(edited(edit)) == OK


def test_a_part_that_some_hosts_share_is_not_what_has_to_be_complete() -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        for rank in found:
            for p in passes_of(rank, True):
                p["indices"] = [i for i in p["indices"] if i >= 12]
                p["levels"] = [[28, f"own {rank['rank'] // 2}"]]

    assert statuses(edited(edit, world=4)) == OK | {"sharding": "warn"}


def test_one_draw_in_common_is_enough() -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        found[1]["draws"][3]["state"] = found[0]["draws"][5]["state"]

    assert statuses(edited(edit)) == OK | {"data_seed": "fail"}


def test_statistics_that_differ_by_little_differ() -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        for row in found[1]["buffers"]:
            row |= {"hash": "other", "means": [row["means"][0] + 1e-4, 1.0]}

    assert statuses(edited(edit)) == OK | {"buffers": "warn"}


@pytest.mark.parametrize("by_design", [{"ending": "distcp"}, {"sharded": True}])
def test_checkpoints_in_parts_come_from_all_hosts(by_design: dict[str, Any]) -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        for rank in found:
            path = f"/runs/part-{rank['rank']}.{by_design.get('ending', 'pt')}"
            rank["files"].append({"path": path, "kind": "checkpoint", "times": 1, "step": 20})
            rank["wrappers"] = [{**wrapper, "sharded": by_design.get("sharded", False)} for wrapper in rank["wrappers"]]

    expected = OK | ({"init_seed": "not_measured"} if "sharded" in by_design else {})
    assert statuses(edited(edit)) == expected


def test_a_host_that_is_slow_in_less_than_half_of_the_steps_makes_nobody_wait() -> None:
    """And is a little slower in all of them."""

    def edit(found: list[dict[str, Any]]) -> None:
        busy = found[0]["times"]["busy_s"]
        found[1]["times"]["busy_s"] = [t * (3.0 if k % 5 in (0, 2) else 1.25) for k, t in enumerate(busy)]

    assert statuses(edited(edit)) == OK


def test_a_host_that_stays_out_of_the_group_is_named_and_the_rest_is_judged() -> None:
    seen = edited(lambda r: r[1].update(initialised=False))
    assert statuses(seen) == OK | {"not_wrapped": "fail"}
    assert "init_process_group was never called on rank 1" in diagnose_hosts(seen)["hosts.not_wrapped"].summary


@pytest.mark.parametrize(
    ("paths", "status"),
    [
        (("/runs/rank0.log", "/runs/rank1.log"), "ok"),
        (("/runs/7/log0.csv", "/runs/7/log1.csv"), "ok"),
        (("/runs/host-00/7.csv", "/runs/host-01/7.csv"), "ok"),
        (("/runs/version_0/log.csv", "/runs/version_1/log.csv"), "warn"),  # counted up by a program, and not by rank
        (("/runs/rank1.log", "/runs/rank0.log"), "warn"),
        (("/runs/events.1718.40", "/runs/events.1718.41"), "warn"),
        (("/runs/rank0.log", "/runs/rank0.log"), "fail"),
    ],
)
def test_logs_named_by_the_rank_are_deliberate_and_those_of_a_time_or_a_process_are_not(
    paths: tuple[str, str], status: str
) -> None:
    seen = edited(logs(*paths))
    assert statuses(seen) == OK | {"writers": status}
    found = diagnose_hosts(seen)["hosts.writers"]
    assert ("named by the rank" in found.summary) == (status == "ok")
    assert (found.value == 1) == (status == "ok")


def test_checkpoints_named_by_the_rank_are_copies_of_one_model() -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        for rank in found:
            rank["files"] = [{"path": f"/runs/last{rank['rank']}.pt", "kind": "checkpoint", "times": 1, "step": 20}]

    assert statuses(edited(edit)) == OK | {"checkpoint_writers": "warn"}


@pytest.mark.parametrize("padding", [True, False])
def test_parts_that_nobody_joins_are_named_before_a_padding_that_matters_less(padding: bool) -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        if padding:
            padded(found)
        for rank in found:
            rank["joined"]["evaluation"] = []

    found = diagnose_hosts(edited(edit))["hosts.evaluation"]
    assert found.status == "warn"
    assert found.summary.startswith("Each host evaluates its own part, and no collective joins them")
    assert ("1 of 10 are on two hosts" in found.summary) == padding
    assert [line.split()[0] for line in found.advice] == [
        "Join",
        *(["Evaluate", "DistributedSampler"] if padding else []),
    ]


def timed(*busy: list[float]) -> Edit:
    """What each host is busy in each step, in seconds."""

    def edit(found: list[dict[str, Any]]) -> None:
        for rank, times in zip(found, busy, strict=True):
            rank["times"] = {"busy_s": times, "step_s": [max(step) for step in zip(*busy, strict=True)]}

    return edit


@pytest.mark.parametrize(("slow_steps", "status"), [(0, "ok"), (7, "ok"), (14, "ok"), (15, "warn"), (20, "warn")])
def test_a_straggler_is_busy_half_as_long_again_in_three_of_four_steps_and_that_is_all_that_is_said(
    slow_steps: int, status: str
) -> None:
    """A moment in which the whole machine is slow, the same step on all hosts, makes none of them a straggler."""
    machine = [0.01 * (1 + 5 * (k % 3 == 0)) for k in range(20)]
    late = [t * (2.0 if k < slow_steps else 0.9) for k, t in enumerate(machine)]
    found = diagnose_hosts(edited(timed(machine, late)))["hosts.straggler"]
    assert (found.status, found.value) == (status, slow_steps / 20)
    assert found.evidence["late_share"] == {0: 0.0, 1: slow_steps / 20}
    assert f"in {slow_steps / 20:.0%} of the steps" in found.summary or (
        slow_steps == 0 and "in no step" in found.summary
    )
    assert bool(found.advice) == (status == "warn")


def test_two_of_four_hosts_are_slow_by_turns_and_each_is_late_in_all_steps() -> None:
    first = [0.030 if k % 2 else 0.025 for k in range(20)]
    found = diagnose_hosts(edited(timed([0.01] * 20, [0.01] * 20, first, first[::-1]), world=4))["hosts.straggler"]
    assert (found.status, found.value) == ("warn", 1.0)
    assert found.evidence["late_share"] == {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0}


def test_an_incomplete_last_batch_is_said_though_every_example_comes_in_some_epoch() -> None:
    def edit(found: list[dict[str, Any]]) -> None:
        for rank in found:
            for epoch, one in enumerate(passes_of(rank, True)):
                one["indices"] = [i for i in one["indices"] if i not in ((0, 1), (2, 3))[epoch]]

    seen = edited(edit)
    assert statuses(seen) == OK
    said = diagnose_hosts(seen)["hosts.sharding"].summary
    assert said.endswith(f"together they are all {EXAMPLES} examples, in 2 epochs of which one leaves out 2.")
    assert diagnose_hosts(edited(lambda _: None))["hosts.sharding"].summary.endswith(f"all {EXAMPLES} examples.")
