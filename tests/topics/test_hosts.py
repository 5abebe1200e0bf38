"""Verdicts on ranks: facts of a healthy job with one thing planted in them change its own verdict, and no other; right jobs of other kinds change none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.helpers.host_facts import EXAMPLES, STEPS, job, one_pass
from workbench.findings.audited import Audit
from workbench.findings.finding import Finding
from workbench.record.json_values import to_json
from workbench.topics.hosts.diagnose import AREAS
from workbench.topics.hosts.diagnose_update import CODES

Ranks = list[dict[str, Any]]
Edit = Callable[[Ranks], Any]
OK = {code.removeprefix("hosts."): "ok" for code in CODES}


def statuses(seen: Audit, **settings: Any) -> dict[str, str]:
    return {f.code.removeprefix("hosts."): f.status for f in wb.hosts.diagnose(seen, **settings)}


def edited(edit: Edit, world: int = 2) -> Audit:
    seen = copy.deepcopy(job(world))
    edit(seen.facts["hosts"]["ranks"])
    return seen


def finding(edit: Edit, code: str, world: int = 2) -> Finding:
    return wb.hosts.diagnose(edited(edit, world))[f"hosts.{code}"]


def each(**fields: Any) -> Edit:
    return lambda found: [rank.update(copy.deepcopy(fields)) for rank in found]


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


def without(gone: Callable[[int, int], bool]) -> Edit:
    """Leave out of the training those examples for which `gone(example, epoch)`."""

    def edit(found: Ranks) -> None:
        for p in trained(found):
            p["indices"] = [i for i in p["indices"] if not gone(i, p["pass"])]

    return edit


def files(kind: str, *paths: str) -> Edit:
    """Each rank writes a file of its own."""

    def edit(found: Ranks) -> None:
        for rank, path in zip(found, paths, strict=True):
            rank["files"] = [f for f in rank["files"] if f["kind"] != kind] + [{"path": path, "kind": kind}]

    return edit


def statistics(means: Any, *moments: str, **fields: Any) -> Edit:
    def edit(found: Ranks) -> None:
        for row in found[1]["buffers"]:
            if not moments or row["moment"] in moments:
                row |= {"hash": "other", "means": means(row["means"]) if callable(means) else means, **fields}

    return edit


def busy(*ranks: list[float]) -> Edit:
    """What each rank is busy in each step, in seconds."""

    def edit(found: Ranks) -> None:
        for rank, times in zip(found, ranks, strict=True):
            rank["times"] = {"busy_s": times, "step_s": [max(step) for step in zip(*ranks, strict=True)]}

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
    "shares leave some out": ("sharding", "warn", without(lambda i, _: i < 4)),
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
    assert planted.evidence
    assert planted.advice
    json.dumps(to_json(planted.to_dict()))


@pytest.mark.parametrize("world", [2, 4])
def test_a_healthy_job_is_ok(world: int) -> None:
    assert statuses(job(world)) == OK
    assert wb.hosts.areas(wb.hosts.diagnose(job(world))) == dict.fromkeys(AREAS, "ok")


NOTHING = {"clips": [], "times": {"step_s": [], "busy_s": []}, "buffers": [], "passes": [], "draws": [], "files": [], "steps": 0,
           "wrappers": [], "calls": {"wrapped": 0, "raw": 0, "other": 0}, "evaluations": [], "parameters": [], "gradients": []}  # fmt: skip


def test_what_was_not_seen_is_not_measured_and_says_why() -> None:
    spawned = edited(lambda r: r.pop() and r[0].update(initialised=False, spawned=2))
    for seen, said in (
        (Audit(facts={}, workload="w"), "workbench hosts"), (job(1), "one rank only"), (edited(lambda r: r.pop(2), 4), "rank 2 wrote no facts"),
        (spawned, "wb.hosts.audit()"),
    ):  # fmt: skip
        found = wb.hosts.diagnose(seen)
        assert [f.code for f in found] == list(CODES)
        assert {f.status for f in found} == {"not_measured"}
        assert said in found["hosts.sharding"].summary
    silent = {"writers": "ok", "checkpoint_writers": "ok", "clip": "ok"}
    assert statuses(edited(each(**NOTHING))) == dict.fromkeys(OK, "not_measured") | silent
    alone = wb.hosts.diagnose(edited(each(initialised=False)))
    assert alone["hosts.not_wrapped"].status == "fail"
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
        (shared, nothing, clipped, "ok", "ok"),  # and a clipping of the script's own, on every rank
        (shared, nothing, apart_from_4, "fail", "ok"),  # and on some ranks only
        (own, own, shared, "ok", "ok"),  # averaged by the script
        (own, clipped, shared, "not_measured", "ok"),  # changed before: clipped, or divided by the number of ranks
        (own, nothing, shared, "not_measured", "ok"),  # averaged in a way that is not to be seen
        (own, nothing, own, "ok", "fail"),  # not averaged
        (nothing, nothing, shared, "ok", "ok"),  # the trainer's own
    ],
)
def test_gradients_tell_of_a_clipping_that_torch_does_not_do(
    after_backward: Any, at_joining: Any, at_step: Any, clip: str, not_wrapped: str
) -> None:
    places = {"after_backward": after_backward, "at_joining": at_joining, "at_step": at_step, "before_clip": at_step}

    def edit(found: Ranks) -> None:
        for rank in found:
            rank["clips"] = []
            for row in rank["gradients"]:
                row |= {name: value(row["step"], rank["rank"]) for name, value in places.items()}

    assert statuses(edited(edit)) == OK | {"clip": clip, "not_wrapped": not_wrapped}
    assert at_step is not apart_from_4 or finding(edit, "clip").step == 4


def uneven(found: Ranks) -> None:
    """The second rank has data for eight updates in each epoch, the first for ten: after these, update k is not update k."""
    last = found[1]
    last |= {"steps": 16, "clips": last["clips"][:16]}
    for one, steps in zip(passes_of(last, True), ([0, 8], [8, 16]), strict=True):
        one["steps"] = steps
    for row in (*last["parameters"], *last["gradients"]):
        if row["step"] >= 8:
            row |= {key: f"later {value}" for key, value in row.items() if isinstance(value, str)}


def second_optimizer(apart: bool) -> Edit:
    def edit(found: Ranks) -> None:
        for rank in found:
            for row in (*rank["parameters"], *rank["gradients"]):
                row["optimizer"] = 1
            rank["parameters"][0]["hash"] += str(rank["rank"]) * apart
            rank["parameters"] = rank["parameters"][:1] if apart else rank["parameters"]

    return edit


def sharded(found: Ranks) -> None:
    for rank in found:
        rank["wrappers"] = [{"kind": "FSDPModule", "sharded": True}]
        for row in (*rank["parameters"], *rank["gradients"]):
            row |= {key: f"{row[key]}{rank['rank']}" for key in ("hash", "before_clip", "at_step") if key in row}
        rank["files"].append({"path": f"/runs/__{rank['rank']}_0.distcp", "kind": "checkpoint"})


# Data.


def cut(first: int, *, drawn: bool = False, hashes: bool = True) -> Edit:
    """Every rank holds a data set of its own, so that positions say nothing: 0 to 19 on both."""

    def edit(found: Ranks) -> None:
        for rank in found:
            for p in passes_of(rank, True):
                rows_of = range(rank["rank"] * first, rank["rank"] * first + 20)
                p["dataset"] |= {"hash": f"part{rank['rank']}" if hashes else None, "length": 20}
                p |= {"indices": list(range(20)), "contents": [f"row{i}" for i in rows_of], "distributed": False}
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


def split(found: Ranks) -> None:
    """`random_split` makes parts of one data set: what is evaluated is not trained on, on purpose."""
    without(lambda i, _: i < 4)(found)
    for rank in found:
        for p in passes_of(rank, False):
            p["dataset"] = dict(passes_of(rank, True)[0]["dataset"])
            p["indices"], p["levels"] = list(range(rank["rank"], 4, 2)), [[4, "held out"]]


def shared_part(found: Ranks) -> None:
    without(lambda i, _: i < 4)(found)
    for rank in found:
        for p in passes_of(rank, True):
            p["levels"] = [[len(p["indices"]), f"own{rank['rank']}"], [EXAMPLES - 4, "training part"]]


def twice(count: int) -> Edit:
    """Four ranks: at most three examples make their shares equally long."""

    def edit(found: Ranks) -> None:
        for number in range(count):
            for p, first in zip(passes_of(found[1 + number % 3], True), passes_of(found[0], True), strict=True):
                p["indices"] = [*p["indices"], first["indices"][number]]

    return edit


def replaced(*seeds: int) -> Edit:
    def edit(found: Ranks) -> None:
        for rank, seed in zip(found, seeds, strict=True):
            drawn = np.random.default_rng(seed).integers(0, EXAMPLES, 40).tolist()
            rank["passes"] = [one_pass(drawn, (0, 20), sampler="RandomSampler", distributed=False)]

    return edit


def single_epoch(**changes: Any) -> Edit:
    return lambda found: [rank.update(passes=[p | changes for p in rank["passes"][:2]]) for rank in found]


def new_loaders(**changes: Any) -> Edit:
    """The epochs of new loaders follow each other."""

    def edit(found: Ranks) -> None:
        for rank in found:
            first, second = passes_of(rank, True)
            for p in (first, second):
                p |= {"optimizers": 1, "set_epoch_calls": 1}
            second |= {"indices": first["indices"], "pass": 0, "loader": 7} | changes

    return edit


# Evaluation and files.


def left_over(found: Ranks) -> None:
    """A sampler that drops the last examples, and all ranks that evaluate those after it."""
    not_evaluated(found)
    for rank in found:
        rank["passes"].append(passes_of(rank, False)[0] | {"indices": [8, 9], "levels": [[2, "rest"]]})


def besides(found: Ranks) -> None:
    """What one rank looks at besides is no evaluation."""
    found[0]["passes"].insert(0, passes_of(found[0], False)[0] | {"indices": [0, 1, 2], "steps": [0, 0]})


def one_evaluates(found: Ranks) -> None:
    for p in passes_of(found[0], False):
        p["indices"] = list(range(10))
    found[1]["passes"] = passes_of(found[1], True)
    found[1]["buffers"] = [b for b in found[1]["buffers"] if b["moment"] != "evaluation"]
    found[1]["evaluations"] = []


def everybody(sums: tuple[Any, Any], size: Any) -> Edit:
    """Everybody evaluates everything, and has to agree."""

    def edit(found: Ranks) -> None:
        for rank, total in zip(found, sums, strict=True):
            rank["joined"]["evaluation"] = []
            rank["evaluations"] = [{"step": 10, "output_sum": total, "output_size": size}]
            for p in passes_of(rank, False):
                p["indices"] = list(range(10))

    return edit


OTHERS: dict[str, tuple[Edit, dict[str, str]]] = {
    "uneven data": (uneven, {}),
    "uneven data and clipping": (lambda r: (uneven(r), r[1].update(clips=r[1]["clips"][:5])), {"clip": "fail"}),
    "uneven data, own gradients": (lambda r: (uneven(r), rows("gradients", before_clip="own", at_step="own")(r)), {"not_wrapped": "fail"}),
    "another optimizer": (second_optimizer(False), {}),
    "another optimizer starts apart": (second_optimizer(True), {"init_seed": "fail"}),
    "the wrapper sends parameters": (lambda r: r[1]["wrappers"][0].update(before="other"), {}),
    "sharded by design": (sharded, {"init_seed": "not_measured"}),
    "a validation split": (split, {}), "a training part": (shared_part, {}),
    "own data sets": (cut(20), {"data_seed": "ok"}), "own data sets overlap": (cut(10), {"sharding": "fail"}),
    "own data sets, augmented": (cut(10, drawn=True), {"sharding": "not_measured"}), "own data sets without hashes": (cut(20, hashes=False), {}),
    "streams": (streamed(False), {"set_epoch": "ok"}), "streams alike": (streamed(True), {"sharding": "fail"}),
    "less than a batch left out": (without(lambda i, _: i < 3), {}),
    "more left out, back in another epoch": (without(lambda i, epoch: i < 6 if epoch == 0 else i >= EXAMPLES - 6), {}),
    "example twice on one rank": (lambda r: [p["indices"].append(p["indices"][0]) for p in passes_of(r[0], True)], {}),
    "with replacement": (replaced(0, 1), {"sharding": "not_measured", "evaluation": "not_measured"}),
    "with replacement, same seed": (replaced(0, 0), {"sharding": "not_measured", "evaluation": "not_measured", "data_seed": "fail"}),
    "one epoch, set_epoch called": (single_epoch(set_epoch_calls=1), {}),
    "one epoch": (single_epoch(set_epoch_calls=0), {"set_epoch": "not_measured"}),
    "one epoch, unshuffled": (single_epoch(set_epoch_calls=0, shuffles=False), {}),
    "new loaders": (new_loaders(), {"set_epoch": "fail"}), "new loaders, another training": (new_loaders(optimizers=2), {}),
    "new loaders side by side": (new_loaders(steps=[0, 10]), {}),
    "a rest by itself": (left_over, {}), "a look besides": (besides, {}), "one evaluates": (one_evaluates, {}),
    "all evaluate all": (everybody((1.0, 1.0), None), {}), "and differ": (everybody((1.0, 1.1), None), {"evaluation": "fail"}),
    "masked outputs": (everybody(("-inf", "-inf"), "inf"), {}), "masked once": (everybody(("-inf", 1.0), "inf"), {"evaluation": "fail"}),
    "NaN outputs": (everybody((None, None), None), {}), "outputs that cancel": (everybody((1e-3, 1.1e-3), 1e4), {}),
    "small outputs differ": (everybody((1e-3, 1.1e-3), 1.0), {"evaluation": "fail"}),
    "NaN times": (busy([float("nan")] * 19, [1.0] * 19), {"straggler": "not_measured"}), "no times": (busy([0.0] * 19, [0.0] * 19), {}),
    "few times": (busy([1.0] * 15, [2.0] * 15), {"straggler": "not_measured"}),
    "logs by rank": (files("log", "/runs/rank0.log", "/runs/rank1.log"), {}), "and a run": (files("log", "/runs/7/log0.csv", "/runs/7/log1.csv"), {}),
    "counted up by a program": (files("log", "/runs/version_0/log.csv", "/runs/version_1/log.csv"), {"writers": "warn"}),
    "by another number": (files("log", "/runs/rank1.log", "/runs/rank0.log"), {"writers": "warn"}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_jobs_of_other_kinds(name: str) -> None:
    edit, expected = OTHERS[name]
    assert statuses(edited(edit)) == OK | expected


@pytest.mark.parametrize(("count", "status"), [(3, "ok"), (4, "fail")])
def test_as_many_examples_may_be_on_two_ranks_as_a_sampler_pads(count: int, status: str) -> None:
    assert statuses(edited(twice(count), world=4)) == OK | {"sharding": status}


@pytest.mark.parametrize(("slow_steps", "status"), [(0, "ok"), (14, "ok"), (15, "warn"), (20, "warn")])
def test_a_straggler_is_busy_half_as_long_again_in_three_of_four_steps(slow_steps: int, status: str) -> None:
    """A moment in which the whole machine is slow, the same step on all ranks, makes none of them a straggler."""
    machine = [0.01 * (1 + 5 * (k % 3 == 0)) for k in range(20)]
    late = [t * (2.0 if k < slow_steps else 0.9) for k, t in enumerate(machine)]
    found = finding(busy(machine, late), "straggler")
    assert (found.status, found.value) == (status, slow_steps / 20)
    assert found.evidence["late_share"] == {0: 0.0, 1: slow_steps / 20}
    if slow_steps == 14:
        assert "rank 1 takes 1.5 times as long as the others in 70% of the steps (limit: 75%)." in found.summary


def test_thresholds_are_arguments() -> None:
    assert statuses(edited(slow), straggler_ratio=3.0) == OK
    assert statuses(edited(slow), straggler_share=1.1) == OK
    assert statuses(edited(busy([1.0] * 10, [2.0] * 10)), min_steps=10)["straggler"] == "warn"
    assert statuses(edited(EVALUATED_APART), large_shift=10.0) == OK | {"buffers": "warn"}


def test_the_size_of_a_shift_decides_between_warn_and_fail() -> None:
    for by, status in ((1e-9, "ok"), (0.05, "warn"), (0.9, "warn"), (1.1, "fail")):  # the first is rounding
        found = finding(statistics(lambda m, by=by: [m[0] + by, 1.0]), "buffers")
        assert found.status == status
        assert found.value == pytest.approx(by if status != "ok" else 0.0)
    for value in (float("nan"), float("inf"), None):
        assert finding(statistics([value, 1.0]), "buffers").status in ("warn", "fail")


def test_what_a_person_reads() -> None:
    """The numbers in the sentences, and the advice that belongs to two causes at once."""
    found = finding(lambda r: (padded(r), no_join(r)), "evaluation")
    assert found.summary.startswith("Each rank evaluates its own part, and no collective joins them")
    assert "1 of 10 are on two ranks" in found.summary
    assert [line.split()[0] for line in found.advice] == ["Join", "Evaluate", "DistributedSampler"]
    assert "2 ranks share 1 cores" in finding(each(host="one", cores=1), "straggler").summary
    for edit in (split, shared_part):
        assert f"all {EXAMPLES - 4} examples" in finding(edit, "sharding").summary
    for planned, said in (
        (list(range(EXAMPLES)), "all 40 examples"),
        (None, "could not be determined"),
    ):  # a run too short for an epoch

        def short(found: Ranks, planned: Any = planned) -> None:
            for rank in found:
                p, plan = rank["passes"][0], planned and planned[rank["rank"] :: 2]
                rank["passes"] = [
                    p | {"planned": plan, "indices": (plan or p["indices"])[:6], "exhausted": False, "steps": [0, 3]}
                ]

        assert said in finding(short, "sharding").summary


def test_lines_that_all_ranks_print_are_a_log() -> None:
    lines = [f"step {k}: loss 0.{k}" for k in range(5)]
    assert statuses(job(printed={"0": lines, "1": lines})) == OK | {"writers": "warn"}
    assert statuses(job(printed={"0": lines, "1": []})) == OK
    tagged = {str(r): [f"rank {r}: step {k}" for k in range(5)] for r in range(2)}
    assert statuses(job(printed=tagged)) == OK
