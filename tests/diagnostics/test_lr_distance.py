"""The distance of a learning rate to the edge, by division."""

from __future__ import annotations

import pytest

from tests.helpers.records import BEST, LASTING, LRS, diagnosis, empty, study
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.distance import lr_distance, swept_lrs, swept_trials


@pytest.mark.parametrize("lr", LRS)
def test_both_ratios(lr: float) -> None:
    found = lr_distance(diagnosis(), lr)
    assert (found.to_best, found.to_edge) == (lr / BEST, lr / LASTING)
    assert found.unstable == (lr >= LASTING)


def test_an_lr_that_was_not_trained_has_ratios_and_no_loss() -> None:
    found = lr_distance(diagnosis(), 0.05)
    assert found.loss != found.loss
    assert found.words == "lr 0.05: not trained; 0.625 x lr* (0.08); 0.312 x the unstable lr (0.16)."


def test_trials_are_in_the_order_of_their_lr() -> None:
    made = study()
    said = diagnose_lr_sweep(made)
    lrs = made.trials.set_index("trial")["peak_lr"]
    assert [float(lrs[trial]) for trial in swept_trials(said)] == sorted(
        float(lrs[trial]) for trial in swept_trials(said)
    )
    assert set(swept_lrs(said)) == {float(lrs[trial]) for trial in swept_trials(said)}


def test_without_a_sweep_nothing_is_known() -> None:
    found = lr_distance(diagnose_lr_sweep(empty()), 0.1)
    assert (found.best, found.edge, found.to_best, found.to_edge) == (None, None, None, None)
    assert found.words.endswith("lr* not measured; unstable not found.")
    assert swept_lrs(diagnose_lr_sweep(empty())) == []
