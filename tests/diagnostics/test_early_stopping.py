"""Each rule on a curve where its answer can be counted; no rule ever beats the full budget where it watches."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.helpers.simulated_checkpoints import evaluated, overfitted
from workbench.topics.checkpoints.early_stopping import COLUMNS, RULES, early_stopping

RULE = {rule.name: rule for rule in RULES}
NAN = math.nan


@pytest.mark.parametrize(
    ("name", "costs", "place"),
    [
        ("patience 1", [3, 2, 1, 2, 0], 3),
        ("patience 1", [3, 2, 2, 1], 2),  # a tie is no improvement
        ("patience 3", [3, 1, 2, 2, 0.5, 2, 2, 2, 2], 7),
        ("patience 3", [3, 2, 1], None),
        ("patience 3", [1, NAN, NAN, NAN, 0], 3),
        ("patience 3", [NAN, NAN, NAN, NAN, 1], 3),
        ("patience 10", [1.0] + [2.0] * 9 + [0.5], None),
        ("patience 3, by 1 %", [1, 0.995, 0.992, 0.991, 0.5], 3),
        ("patience 3, by 1 %", [1, 0.98, 0.97, 0.96, 0.95], None),
        ("GL 2", [1, 1.01, 1.0199, 1.021], 3),
        ("GL 5", [1, 1.04, 1.06], 2),
        ("GL 5", [0, 1, 2], None),  # a share of nothing
        ("GL 5", [-1, 1, 2], None),
        ("UP 3", [1, 2, 3, 2.5, 2.6, 2.7, 2.8], 6),
        ("UP 3", [1, 2, 3, 3, 4, 5], None),
        ("twice as long", [3, 2, 1, 2, 2, 2, 2], 5),
        ("twice as long", [9, 8, 7, 6, 1, 2, 2, 2, 2], 8),
    ],
)
def test_where_a_rule_stops(name: str, costs: list[float], place: int | None) -> None:
    assert RULE[name].stop(np.array(costs, dtype=float)) == place


def test_the_table_holds_what_can_be_counted() -> None:
    """Best at the last evaluation; patience 3 stops at the fourth of ten intervals and keeps the second value."""
    curve = [1.0, 0.5, 0.6, 0.6, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0]
    other = np.linspace(1, 0, 11)
    table = early_stopping(evaluated([curve, other], [np.array(curve) + 1, other + 1])).set_index("rule")
    row = table.loc["patience 3"]
    assert row["runs"] == 2
    assert row["stopped"] == 1
    assert row["steps_saved"] == pytest.approx((0.6 + 0.0) / 2)
    assert row["lost"] == pytest.approx((0.5 + 0.0) / 2)
    assert row["lost_frac"] == pytest.approx(0.25)
    assert row["worst_lost_frac"] == pytest.approx(0.5)
    assert row["test_lost"] == pytest.approx(0.25)
    assert set(table["source"]) >= {"rule of thumb", "Prechelt 1998"}


def test_the_full_budget_is_never_worse_where_it_is_watched() -> None:
    rng = np.random.default_rng(0)
    curves = [overfitted(seed=k, rise=rng.uniform(-0.3, 0.6), noise=rng.uniform(0, 0.2)) for k in range(200)]
    table = early_stopping(evaluated(curves))
    assert (table["lost"] >= 0).all()
    assert table["lost"].max() > 0
    assert (table["stopped"] > 0).any()
    assert table["test_lost"].isna().all()


@pytest.mark.parametrize("curve", [[1.0], [NAN] * 8, []])
def test_nothing_to_replay(curve: list[float]) -> None:
    table = early_stopping(evaluated([curve]))
    assert table.empty
    assert table.columns.tolist() == COLUMNS


def test_a_rule_that_stops_before_anything_is_finite_loses_everything() -> None:
    table = early_stopping(evaluated([[NAN, NAN, NAN, NAN, 2.0, 1.0, 0.5, 0.4]])).set_index("rule")
    assert table.loc["patience 3", "lost"] == math.inf
    assert table.loc["patience 10", "lost"] == 0
