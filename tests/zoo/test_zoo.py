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
from tests.zoo.score import FAULT_SCORES, alarms, wilson

PACKAGE = Path(__file__).parents[2] / "workbench"
FOUND = ("nan-input/digits_mlp", "validation-in-train/digits_mlp", "decays-early/multilabel", "detached/digits_mlp", "sorted-stream/stream", "lr-over-100/iris")  # fmt: skip
HEALTHY = ("control/digits_mlp-seed0", "control/digits_tanh-seed0")


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


def test_every_accepted_code_is_one_that_the_package_gives() -> None:
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    known = set(re.findall(r"[a-z_]+\.[a-z_]+", source))
    names = set(re.findall(r'"([a-z_]+)"', source))
    accepted = {code for case in CASES.values() for code in case.accepts}
    assert sorted(code for code in accepted if code not in known and code.split(".")[1] not in names) == []


def test_the_interval_of_a_share_is_wilsons() -> None:
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)


def test_a_config_is_better_where_most_seeds_say_so_and_worse_where_it_diverges() -> None:
    base = [1.0, 1.1, 0.9, 1.0, 1.05]
    assert judged(base, [value - 0.5 for value in base]) == "better"
    assert judged(base, [0.5, 1.6, 0.7, 1.2, 1.1]) == "same"
    assert judged(base, [*base[:4], math.inf]) == "worse"
    assert judged(base, base) == "same"


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_named_first(name: str) -> None:
    said = diagnosed(CASES[name])
    assert FAULT_SCORES["first"](said), said["findings"]


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    said = diagnosed(CASES[name])
    assert said["verdict"] == "ok", (alarms(said), said["findings"])
