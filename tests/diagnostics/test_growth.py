from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.simulated_curves import EDGE, quadratic
from workbench.curves.next_lrs import edge_from_growth


@pytest.mark.parametrize(("rule", "memory"), [("sgd", 0.0), ("momentum", 0.5), ("momentum", 0.9), ("nesterov", 0.9), ("adam", 0.9)])  # fmt: skip
@pytest.mark.parametrize("frac", [1.05, 1.3, 3.0])
def test_edge_of_a_quadratic_from_one_unstable_run(rule, memory, frac):
    edge = EDGE[rule](memory)
    loss = quadratic(rule, frac * edge, 300, memory=memory)
    found = edge_from_growth(loss, lr=frac * edge, optimizer=rule, momentum=memory, beta1=memory)
    assert found == pytest.approx(edge, rel=0.01)


def test_shifting_the_loss_changes_nothing():
    loss = quadratic("sgd", 2.2, 300)
    assert edge_from_growth(loss - 1000, lr=2.2, optimizer="sgd") == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("loss", [[], [1.0, np.nan], np.ones(50), np.linspace(2, 1, 50), [np.nan] * 20])
def test_no_growth_no_edge(loss):
    assert edge_from_growth(loss, lr=1.0, optimizer="sgd") is None


def test_unknown_rule_is_none():
    assert edge_from_growth(quadratic("sgd", 2.2, 100), lr=2.2, optimizer="nadam") is None
