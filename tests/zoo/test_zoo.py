"""The zoo keeps its promises, and what has been right once stays right: a few faults and controls in under a minute."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.zoo.bases import BASES
from tests.zoo.cases import CASES
from tests.zoo.faults import FAULTS
from tests.zoo.retrain import judged
from tests.zoo.run import diagnosed
from tests.zoo.score import FAULT_SCORES, alarms
from workbench.topics.registry import TOPICS

pytestmark = pytest.mark.usefixtures("no_figures")
PACKAGE = Path(__file__).parents[2] / "workbench"
FOUND = ("nan-input/digits_mlp", "decays-early/multilabel", "detached/digits_mlp", "sorted-stream/stream")
LATER = ("validation-in-train/digits_mlp", "lr-over-100/iris")
HEALTHY = "control/digits_mlp-seed0", pytest.param("control/digits_tanh-seed0", marks=pytest.mark.slow)

CODES = re.findall(r"^\| `([a-z_.]+)` \|", (PACKAGE.parent / "docs" / "codes.md").read_text(), re.MULTILINE)
LOOP = next(topic.codes for topic in TOPICS if topic.name == "loop")
OTHERS = [topic.codes for topic in TOPICS if topic.name != "loop"]
NO_CASE = {
    "a measurement, which never warns": ["lr.best", "lr.unstable", "clipping.threshold"],
    "a sweep over learning rates that a person gave": ["lr.grid_edge"],
    "OptimizersStudy": ["optimizers.better", "optimizers.rule_mismatch", "optimizers.stale_second_moment"],
    "BatchSizeStudy": ["batch_size.tuned_directly", "batch_size.retune", "batch_size.equivalence", "batch_size.regularisation"],
    "BatchNormStudy, over several processes": ["batch_norm.rank_local", "batch_norm.first_device_ema", "batch_norm.variance_of_means"],
    "CheckpointStudy": ["checkpoints.resume_jump"],
    "InputPipelineStudy": ["input.sync_every_step", "input.example_count"],
    "check_stability, asked before anything is tuned": ["stability.verdict"],
    "ModificationStudy": [code for code in CODES if code.startswith("comparison.")],
    "HostsStudy": [code for code in CODES if code.startswith("hosts.")],
    "ParameterServerStudy": [code for code in CODES if code.startswith("ps.")],
    "a loop of one's own, tried in tests/own_loops": [code for code in LOOP if not any(code in codes for codes in OTHERS)],
    "diagnose_tracking": [code for code in CODES if code.startswith("tracking.")],
}  # fmt: skip
"""Why `diagnose` never warns of a code: what it is, or who does."""


def test_there_are_enough_cases_of_each_sort_and_half() -> None:
    kinds = Counter(case.kind for case in CASES.values())
    assert len(BASES) >= 16
    assert len(FAULTS) >= 40
    assert kinds["faults"] >= 120
    assert kinds["controls"] >= 80
    for kind, total in kinds.items():
        tune = sum(case.half == "tune" for case in CASES.values() if case.kind == kind)
        assert 0.35 < tune / total < 0.65


def test_a_case_stays_in_its_half_whatever_is_added() -> None:
    assert CASES["nan-input/digits_mlp"].half == "tune"
    assert CASES["sorted-stream/stream"].half == "scored"


def test_every_code_that_diagnose_warns_of_has_a_case() -> None:
    accepted = {code for case in CASES.values() for code in case.accepts}
    without = [code for codes in NO_CASE.values() for code in codes]
    assert sorted(accepted - set(CODES)) == [], "a case accepts what no finding is called"
    assert sorted(without) == sorted(set(CODES) - accepted)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ({"advice": ["Lower it."], "advice_code": "lr.too_high", "adopted": True, "changed": ["peak_lr"]}, True),
        ({"advice": ["Shuffle."], "advice_code": "data.order", "adopted": True, "changed": ["peak_lr"]}, False),
        ({"advice": [], "advice_code": None, "adopted": True, "changed": ["peak_lr"]}, True),
        ({"advice": [], "advice_code": None, "adopted": True, "changed": ["warmup_steps"]}, False),
        ({"advice": [], "advice_code": None, "adopted": False, "changed": []}, False),
    ],
)
def test_what_to_do_first_is_an_advice_or_the_adopted_config(said: dict[str, object], right: bool) -> None:
    assert FAULT_SCORES["first advice"]({**said, "accepts": ["lr.too_high"]}) is right


def test_a_config_is_better_where_most_seeds_say_so_and_worse_where_it_diverges() -> None:
    base = [1.0, 1.1, 0.9, 1.0, 1.05]
    assert judged(base, [value - 0.5 for value in base]) == "better"
    assert judged(base, [0.5, 1.6, 0.7, 1.2, 1.1]) == "same"
    assert judged(base, [*base[:4], math.inf]) == "worse"
    assert judged(base, base) == "same"


@pytest.mark.parametrize("name", [*FOUND, *(pytest.param(name, marks=pytest.mark.slow) for name in LATER)])
def test_a_fault_is_named_first(name: str) -> None:
    said = diagnosed(CASES[name])
    assert FAULT_SCORES["first"](said), said["findings"]


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    """By default no alarm: a run that was not paid for leaves its question unmeasured. Without a limit all of it is ok."""
    assert alarms(diagnosed(CASES[name])) == []
    said = diagnosed(CASES[name], "none")
    assert said["verdict"] == "ok", (alarms(said), said["findings"])
