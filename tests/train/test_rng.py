"""Random state: saved and put back bit for bit, and never left changed behind the caller's back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from workbench.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from workbench.train.rng import capture_rng, isolated_rng, restore_rng, seed_all


def draw() -> tuple[Any, ...]:
    """The next numbers of every generator; the Gaussian ones keep half a pair for the next call."""
    return (torch.randn(3).tolist(), np.random.randn(), np.random.rand(), random.gauss(0, 1), random.random())


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_captured_state_gives_the_same_numbers_again(before: int) -> None:
    seed_all(5)
    for _ in range(before):
        np.random.randn(), random.gauss(0, 1)
    state = capture_rng()
    expected = [draw() for _ in range(3)]
    seed_all(6)
    assert draw() != expected[0]
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected


def test_the_state_survives_a_checkpoint(tmp_path: Any) -> None:
    seed_all(7)
    np.random.randn(), random.gauss(0, 1)
    save_checkpoint(tmp_path, Checkpoint(0, {}, capture_rng(), {}))
    expected = draw()
    restore_rng(load_checkpoint(tmp_path / "step-00000000").trainer)
    assert draw() == expected


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_block_leaves_no_trace(error: type[BaseException] | None) -> None:
    seed_all(8)
    expected, state = None, capture_rng()
    expected = draw()
    restore_rng(state)

    def block() -> None:
        with isolated_rng():
            seed_all(9)
            draw()
            if error is not None:
                raise error

    if error is None:
        block()
    else:
        with pytest.raises(error):
            block()
    assert draw() == expected


def test_every_seed_of_the_tuple_counts_in_every_generator() -> None:
    seen = []
    for seeds in ((0,), (1,), (0, 1), (1, 0), (2**31,)):
        seed_all(*seeds)
        seen.append(draw())
    for numbers in zip(*seen, strict=True):
        assert len({str(number) for number in numbers}) == 5
    seed_all(0, 1)
    assert draw() == seen[2]


def test_a_device_with_a_generator_of_its_own_is_part_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS draws from its own generator; here one that only counts stands in for it."""
    state = [torch.tensor([5], dtype=torch.uint8)]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor(state[0].tolist(), dtype=torch.uint8))
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda new: state.__setitem__(0, new.clone()))
    with isolated_rng():
        state[0] += 1
    assert state[0].tolist() == [5]
    stored = capture_rng()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    restore_rng(stored)
    assert "mps" not in capture_rng()
