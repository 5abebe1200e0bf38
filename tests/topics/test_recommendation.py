"""What is adopted and what is not, each case beside its healthy twin; the proof over seeds, and settings far from usual."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.helpers.simulated_records import evaluations, record, trial
from tests.helpers.workloads import small_net, small_workload
from workbench.curves.judged import judged
from workbench.findings.answers import answers
from workbench.playbook.verdict import held_to_the_end
from workbench.studies.session import open_session
from workbench.topics.optimizers.constants import CODES, diagnose_replaced
from workbench.topics.recommendation.diagnose import recommend, screen
from workbench.topics.recommendation.study import Proof, collect_replaced, constants_of, suspects

TOTAL, SEEDS = 100, 4
FALLING = np.linspace(2, 1, TOTAL)
SPREAD = np.array([0.0, 0.01, -0.01, 0.02])
STEPS = [0, 50, 100]


def known(
    star: float = 0.3, unstable: float | None = None, *more: wb.Finding, lrs: tuple[float, ...] = ()
) -> wb.Diagnosis:
    points = [{"lr": lr, "loss": abs(math.log(lr / star)), "unstable": False} for lr in (*lrs, star)]
    best = wb.Finding(code="lr.best", status="ok", value=star, summary="planted", evidence={"points": points})
    status: Any = "ok" if unstable else "not_measured"
    edge = wb.Finding(code="lr.unstable", status=status, value=unstable, summary="planted")
    return wb.Diagnosis(findings=(best, edge, *more))


def alarm(code: str, status: Any) -> wb.Finding:
    return wb.Finding(code=code, status=status, summary="planted")


class Study:
    """Runs of a baseline at lr 0.1 and of others, each with the selected metric at its evaluations."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []

    def run(self, lr: float, curve: Any, *, loss: Any = FALLING, steps: Any = STEPS, **more: Any) -> None:
        self.evals += evaluations(len(self.runs), steps[: len(curve)], curve, split="validation")
        self.runs.append(trial(loss, lr, columns={"grad_norm": np.full(len(loss), 0.5)}, **more))

    def arm(self, lr: float, ends: Any, *, first: str = "lr_sweep", **more: Any) -> Study:
        """One run a seed, from 2 straight to its end."""
        for seed, end in enumerate(np.broadcast_to(ends, SEEDS)):
            stage = first if seed == 0 else "baseline" if lr == 0.1 else "proof"
            self.run(lr, [2.0, (2.0 + end) / 2, end], seed=seed, stage=stage, **more)
        return self

    @property
    def record(self) -> Any:
        return record(self.runs, evals=self.evals, total_steps=TOTAL, peak_lr=0.1)


def two_arms(before: Any, after: Any, **more: Any) -> Any:
    return Study().arm(0.1, before, **more).arm(0.3, after, **more).record


def said(made: Any, diagnosis: wb.Diagnosis | None = None) -> tuple[bool, str]:
    found = recommend(made, diagnosis or known())
    assert found["adopted"] is bool(found["changed"])
    return found["adopted"], found["reason"]


def test_the_best_of_more_evaluations_is_no_gain() -> None:
    """The same noise, seen three times by the baseline and a hundred times by the candidate."""
    rng, study = np.random.default_rng(0), Study()
    for seed in range(SEEDS):
        study.run(0.1, [2.0, *(1 + 0.2 * rng.standard_normal(2))], seed=seed, stage="baseline")
    for seed in range(SEEDS):
        curve = np.append(2.0, 1 + 0.2 * rng.standard_normal(TOTAL))
        study.run(0.3, curve, seed=seed, stage="lr_sweep" if seed == 0 else "proof", steps=range(TOTAL + 1))
    made = study.record
    every = [made.evals[made.evals["trial"] == number]["value"].min() for number in range(2 * SEEDS)]
    assert min(every[:SEEDS]) > max(every[SEEDS:]) + 0.1, "by all its evaluations it would win under every seed"
    found = recommend(made, known())
    assert not found["adopted"]
    assert abs(np.mean(found["proof"]["arms"][0]["gains"])) < 0.3


@pytest.mark.parametrize("rise", [0.0, 0.6])
def test_an_adopted_config_that_overfits_says_where_it_is_best_and_how_it_ends(rise: float) -> None:
    at, study = np.linspace(0, 1, 11), Study()
    for lr, low, up in ((0.1, 1.6, 0.0), (0.3, 0.5, rise)):
        for seed in range(SEEDS):
            curve = 2.0 + (low - 2.0 + 0.01 * seed) * np.minimum(at / 0.2, 1) + up * np.maximum(at - 0.2, 0) / 0.8
            stage = "baseline" if lr == 0.1 else "lr_sweep" if seed == 0 else "proof"
            study.run(lr, curve, steps=np.arange(0, TOTAL + 1, 10), seed=seed, stage=stage)
    _, found = held_to_the_end(study.record, known(0.3), recommend(study.record, known(0.3)))
    text = next(a.text for a in answers(known(0.3).findings, found) if a.question == "Config")
    assert found["adopted"]
    late = found["at_end"]
    assert late == ({"best_steps": [20, 20], "steps": TOTAL, "last": pytest.approx(1.12)} if rise else None)
    assert ("at step 20 of 100, p" in text and "It is 1.12 at the end" in text) is bool(rise)


def test_the_lr_keeps_a_distance_from_the_edge() -> None:
    """lr* at 0.3 under an edge at 0.4: the best point of the sweep at 0.267 or below is the candidate."""
    study = Study().arm(0.1, 1.0 + SPREAD).arm(0.3, 0.4 + SPREAD).arm(0.2, 0.5 + SPREAD)
    near = known(0.3, 0.4, lrs=(0.05, 0.1, 0.2))
    assert recommend(study.record, near)["config"]["peak_lr"] == 0.2
    assert recommend(study.record, known(0.3, 0.45, lrs=(0.05, 0.1, 0.2)))["config"]["peak_lr"] == 0.3
    assert recommend(study.record, known(0.3, 0.12, lrs=(0.05, 0.1, 0.2)))["candidate"] is None


@pytest.mark.parametrize("proved", [True, False])
def test_a_proved_lr_is_the_change_though_the_search_went_on_to_a_lower_loss(proved: bool) -> None:
    study = Study().arm(0.1, 1.0 + SPREAD)
    if proved:
        study.arm(0.2, 0.5 + SPREAD)
    study.run(0.3, [2.0, 1.2, 0.4], stage="lr_sweep")
    found = recommend(study.record, known(0.3, lrs=(0.1, 0.2)))
    assert (found["adopted"], found["config"]["peak_lr"]) == (proved, 0.2 if proved else 0.1)


def test_a_candidate_that_depends_on_the_seed_three_times_as_much_is_refused() -> None:
    """Its gain has to outweigh that: a baseline that learns nothing under any seed does not vary at all."""
    adopted, reason = said(two_arms(0.59 + SPREAD / 4, 0.5 + 2 * SPREAD))
    assert not adopted
    assert "its standard deviation over the seeds is 0.031, the baseline's 0.0038" in reason
    for before in (2.0 + SPREAD / 1000, 0.59 + SPREAD):
        adopted, reason = said(two_arms(before, 0.5 + 2 * SPREAD))
        assert adopted
        assert reason.endswith("one-sided paired t over 3 seeds (limit 0.05).")


@pytest.mark.parametrize(("code", "status", "vetoes"), [
    ("loop.no_gradient", "warn", True), ("loss.broadcast", "fail", True), ("schedule.collapse", "fail", True),
    ("data.labels", "fail", True), ("data.scale", "warn", False), ("init.loss", "warn", False),
    ("architecture.no_norm", "warn", False), ("loop.no_gradient", "ok", False), ("lr.too_low", "warn", False),
])  # fmt: skip
def test_a_fault_of_structure_is_mended_before_anything_is_tuned(code: str, status: str, vetoes: bool) -> None:
    adopted, reason = said(two_arms(1.0 + SPREAD, 0.5 + SPREAD), known(0.3, None, alarm(code, status)))
    assert adopted is not vetoes
    assert (f"Not adopted: fix {code} first" in reason) is vetoes


def test_a_baseline_that_diverges_under_every_seed_gives_way_to_one_that_trains_under_every_seed() -> None:
    study = Study()
    for seed in range(SEEDS):
        study.run(0.1, [2.0 + SPREAD[seed]], seed=seed, stage="baseline", loss=[2.0, math.nan], state="diverged")
    study.arm(0.01, [0.5, 0.3, 1.2, 0.8])
    adopted, reason = said(study.record, known(0.01))
    assert adopted
    assert reason.endswith("Adopted: the baseline diverges under each of n = 3 seeds, the candidate under none.")
    study.runs[-1]["state"] = "diverged"
    adopted, reason = said(study.record, known(0.01))
    assert not adopted, "the same values, which by themselves may be chance"
    assert "p = 0.05" in reason


@pytest.mark.parametrize(("beyond", "adopted", "why"), [
    (None, False, "not trained at 1.5 times its lr"), ({}, True, "Adopted"),
    ({"loss": np.append(FALLING[:50], np.linspace(2, 50, 60))}, False, "no other change that was tried trains stably with a margin"),
    ({"warmup_steps": 20}, False, "not trained at 1.5 times its lr"),
], ids=["not tried", "stable", "unstable", "stable with more warmup"])  # fmt: skip
def test_a_cure_shows_by_itself_how_far_it_is_from_the_edge(beyond: Any, adopted: bool, why: str) -> None:
    """A warmup opens lr 0.3, beyond the edge without one at 0.2; half as much again tells how near that is."""
    long: dict[str, Any] = {"warmup_steps": 10, "total_steps": TOTAL + 10, "loss": np.linspace(2, 1, TOTAL + 10)}
    study = Study().arm(0.1, 1.0 + SPREAD).arm(0.3, 0.5 + SPREAD, first="fix", **long)
    study.arm(0.1, 1.0 + SPREAD, **long | {"warmup_steps": 0})
    if beyond is not None:
        study.run(0.45, [2.0, 1.5], stage="margin", **long | beyond)
    made = study.record
    made.facts["own_config"] = made.config | {"total_steps": 10 * TOTAL}
    said_so, reason = said(made, known(0.1, 0.2))
    assert said_so is adopted
    assert why in reason
    assert screen(made, known(0.1, 0.2)).get("untried", False) is ("1.5 times" in why)
    if adopted:  # stretched to the length of the workload's own run
        config = recommend(made, known(0.1, 0.2))["config"]
        assert (config["warmup_steps"], config["total_steps"]) == (100, 10 * TOTAL + 100)


def test_the_config_to_paste_is_as_long_as_what_was_trained_where_longer_runs_were_asked_for() -> None:
    made = two_arms(1.0 + SPREAD, 0.5 + SPREAD)
    made.facts["own_config"] = made.config | {"total_steps": TOTAL // 2}
    found = recommend(made, known())
    assert (found["changed"], found["config"]["total_steps"]) == (["peak_lr"], TOTAL)
    assert f"total_steps={TOTAL}," in found["paste"]
    assert found["reason"].endswith("Measured in 100 steps, as asked for; the workload's config has 50.")


def test_a_clip_far_too_low_is_loosened_and_not_outrun_by_the_lr() -> None:
    """Every step of the baseline is clipped; ten times its lr would gain as much as a looser threshold."""
    study = Study().arm(0.1, 1.5 + SPREAD, max_grad_norm=0.01).arm(1.0, 0.5 + SPREAD, max_grad_norm=0.01)
    study.arm(0.1, 0.55 + SPREAD, first="clipping", max_grad_norm=1.0)
    study.run(0.15, [2.0, 0.5], stage="margin", max_grad_norm=1.0)
    made = record(study.runs, evals=study.evals, total_steps=TOTAL, peak_lr=0.1, max_grad_norm=0.01)
    found = recommend(made, known(1.0))
    assert found["candidate"] == "lr 0.1, clipping at 1"
    for run in study.runs:
        run["columns"]["grad_norm"] = np.where(np.arange(TOTAL) < 60, 0.5, 0.005)
    rarely = record(study.runs, evals=study.evals, total_steps=TOTAL, peak_lr=0.1, max_grad_norm=0.01)
    assert recommend(rarely, known(1.0))["candidate"] == "lr 1"


REPLACED_STEPS = 200
CONSTANTS, DECAY = tuple(CODES)


def falling(end, *, start=2.3):
    return end + (start - end) * np.exp(-np.arange(REPLACED_STEPS) / 20)


def one(*, norms=None, **config):
    """The baseline of a study, and its constants."""
    values = {"param_norm": 1.0, "update_norm": 0.01, "grad_norm": 1.0} | (norms or {})
    columns = {name: np.full(REPLACED_STEPS, value) for name, value in values.items()}
    own = {"optimizer": "momentum", "batch_size": 50, "warmup_steps": 0} | config
    first = trial(falling(0.1), own.pop("peak_lr", 0.1), stage="baseline", columns=columns, total_steps=REPLACED_STEPS)
    r = record([first], **own)
    return judged(r).curves[0], constants_of(r.config)


HALF_MOVED, HARDLY_MOVED, FLAT = {"update_norm": 0.02}, {"update_norm": 0.001}, {"grad_norm": 0.001}


@pytest.mark.parametrize(
    ("config", "field", "usual", "far"),
    [
        ({"optimizer": "adam"}, "eps", (1e-12, 1e-4), (0.9e-12, 1.1e-4)),
        ({"optimizer": "adam"}, "beta2", (0.5, 0.9995), (0.49, 0.9996)),
        ({"optimizer": "adam"}, "beta1", (0.95,), (0.951,)),
        ({"optimizer": "rmsprop"}, "rho", (0.5, 0.995), (0.49, 0.996)),
        ({}, "momentum", (0.95,), (0.951,)), ({}, "warmup_steps", (20,), (21,)),
        ({"noise_scale": 100.0}, "batch_size", (5,), (3, 4)), ({"batch_size": 4}, "noise_scale", (63.0,), (64.0,)),
        # 0.05 of the gradient, or where it is decoupled of the update: 200 steps at lr 0.001 with weights 50 times as long
        ({}, "weight_decay", (0.045,), (0.055,)),
        ({"optimizer": "adamw", "peak_lr": 1e-3, "norms": HALF_MOVED}, "weight_decay", (0.9,), (1.1,)),
        # 0.1 in all: 200 steps at lr 0.001, or at lr 0.1 with a momentum that makes ten of each
        ({"optimizer": "adamw", "peak_lr": 1e-3, "norms": HARDLY_MOVED}, "weight_decay", (0.45,), (0.55,)),
        ({"norms": FLAT}, "weight_decay", (4.5e-4,), (5.5e-4,)),
    ],
)  # fmt: skip
def test_how_far_is_far(config, field, usual, far):
    name = "batch_size" if field == "noise_scale" else field
    for values, found in ((usual, []), (far, [name])):
        for value in values:
            given = config | {field: value}
            scale = given.pop("noise_scale", None)
            assert [s.field for s in suspects(*one(**given), noise_scale=scale)] == found, value


def study(own, other, *, validation=None, code=DECAY, field="weight_decay", value=0.3, usual=0.0, full_batch=True):
    trials = [trial(own, 0.1, stage="baseline", **{field: value}), trial(other, 0.1, stage="replaced")]
    evals = []
    for number, ends in enumerate(validation or ()):
        evals += evaluations(number, [0, REPLACED_STEPS], [2.3, ends], split="validation")
    rows = [{"code": code, "field": field, "own": value, "usual": usual, "baseline": 0, "trial": 1}]
    facts = {"replaced": {"constants": {field: value}, "rows": rows}}
    return record(trials, evals=evals, facts=facts, full_batch=full_batch, **{field: value})


@pytest.mark.parametrize(("own", "validation", "status"), [
    (0.18, (0.18, 0.12), "warn"), (0.18, (0.14, 0.12), "ok"), (0.11, (0.18, 0.12), "ok"),  # both losses have to be lower by a quarter
    (0.13, (0.04, 0.005), "ok"),  # solved either way
])  # fmt: skip
def test_an_unusual_constant_or_a_decay_costs_something_where_both_losses_are_clearly_lower_without(
    own, validation, status
):
    fields = {"field": "eps", "value": 0.1, "usual": 1e-8, "code": CONSTANTS}
    for code, given in ((CONSTANTS, fields), (DECAY, {})):
        found = diagnose_replaced(study(falling(own), falling(0.1), validation=validation, **given))[code]
        assert (found.status, "leaves the loss higher" in found.summary) == (status, status == "warn")


LOST = np.full(REPLACED_STEPS, math.nan)
LOST[:5] = 2.3


@pytest.mark.parametrize(("own", "validation", "status"), [
    (falling(2.29), (2.29, 0.2), "fail"), (falling(1.2), (1.2, 0.2), "warn"),
    (falling(0.2), (0.15, 0.2), "ok"),  # a worse fit that generalises better is what decay is for
    (falling(0.12), (0.22, 0.2), "ok"), (falling(0.05), (9.0, 0.2), "fail"),  # a perfect fit to the training data alone
    (LOST, (math.nan, 0.2), "fail"), (falling(1.2), None, "warn"),
    # of the 2.2 that are learned, or of 2.1 by a metric that a better fit does not make up for
    (falling(0.298), None, "ok"), (falling(0.342), None, "warn"), (falling(2.058), None, "warn"), (falling(2.102), None, "fail"),
    (falling(0.05), (1.23, 0.2), "ok"), (falling(0.05), (1.27, 0.2), "warn"),
])  # fmt: skip
@pytest.mark.parametrize("code", CODES)
def test_what_the_run_with_the_usual_value_gains_decides(own, validation, status, code):
    field, value, usual = ("weight_decay", 0.3, 0.0) if code == DECAY else ("eps", 1.0, 1e-8)
    made = study(own, falling(0.1), validation=validation, code=code, field=field, value=value, usual=usual)
    found = diagnose_replaced(made)
    assert found[code].status == status
    assert bool(found[code].advice) is (status != "ok")
    assert f"{value:g}" in found[code].summary
    (other,) = set(CODES) - {code}
    assert found[other].status == "ok"


def decayed(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    every = list(params)
    matrices, rest = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 2.0}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def slow(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr, eps=10.0)


def usual(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr)


@pytest.mark.parametrize(("config", "field"), [
    ({"weight_decay": 2.0}, "weight_decay"), ({"optimizer": decayed}, "weight_decay"), ({"optimizer": slow}, "eps"),
])  # fmt: skip
def test_a_setting_that_keeps_it_from_learning_is_found_and_the_usual_one_trained_once(
    tmp_path: Path, config: dict[str, Any], field: str
) -> None:
    workload = small_workload()
    workload = workload.replace(config=wb.TrainConfig(**{"peak_lr": 0.05, "total_steps": 60, "batch_size": 8} | config))
    trainer = wb.Trainer(device="cpu")
    with open_session(workload, stem="diagnosis", settings={}, trainer=trainer, out=tmp_path / "s") as session:
        for _ in range(2):  # asked again, nothing is trained again
            collect_replaced(session)
        record = session.record
    assert record.trials["stage"].tolist() == ["baseline", "replaced"]
    found = diagnose_replaced(record)[DECAY if field == "weight_decay" else CONSTANTS]
    assert found.status in ("warn", "fail"), found
    assert field in found.summary
    if not callable(config.get("optimizer")):
        assert record.trials.iloc[1][field] != record.config[field]


def test_seeds_that_do_not_decide_are_followed_by_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, then two: both arms, the first three not trained again, and not the seed that chose the candidate."""
    monkeypatch.setattr(
        "workbench.topics.recommendation.study.worth_more_seeds", lambda proof: len(proof["seeds"]) == 3
    )
    workload = small_workload(build_model=lambda: small_net(0.3))
    with open_session(workload, stem="proof", settings={}, out=tmp_path / "s") as session:
        session.trial(workload.config, stage="baseline")
        Proof(seeds=3, more_seeds=2).extend(session, workload.config.replace(peak_lr=0.1))
        trials = session.record.trials
    assert trials["stage"].tolist() == ["baseline"] + ["proof"] * 10
    seeds = {lr: sorted(rows["shared_seed"]) for lr, rows in trials.groupby("peak_lr")}
    assert seeds == {0.05: [0, 1, 2, 3, 4, 5], 0.1: [1, 2, 3, 4, 5]}


def test_where_no_lr_is_the_best_one_the_sweep_says_why():
    made = Study().arm(0.1, 1.0).record
    assert "needs at least two, so there is nothing" in said(made, wb.lr_sweep.diagnose(made))[1]
