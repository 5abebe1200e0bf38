"""Random state saved, put back and left alone; and the request to stop, which reaches whoever trains."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench.progress import catch_interrupt
from workbench.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from workbench.train.rng import capture_rng, isolated_rng, restore_rng, seed_all


def draw() -> tuple[Any, ...]:
    """The next numbers of every generator; the Gaussian ones keep half a pair for the next call."""
    return (torch.randn(3).tolist(), np.random.randn(), np.random.rand(), random.gauss(0, 1), random.random())


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_captured_state_gives_the_same_numbers_again_also_from_a_checkpoint(tmp_path: Path, before: int) -> None:
    seed_all(5)
    for _ in range(before):
        np.random.randn(), random.gauss(0, 1)
    state = capture_rng()
    save_checkpoint(tmp_path, Checkpoint(0, {}, state, {}))
    expected = [draw() for _ in range(3)]
    seed_all(6)
    assert draw() != expected[0]
    for stored in (state, load_checkpoint(tmp_path / "step-00000000").trainer):
        restore_rng(stored)
        assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_leaves_no_trace_also_when_it_raises(error: type[BaseException]) -> None:
    seed_all(8)
    state = capture_rng()
    expected = draw()
    restore_rng(state)

    def block() -> None:
        with isolated_rng():
            seed_all(9)
            draw()
            raise error

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


def test_ctrl_c_is_a_request_once_and_an_error_twice() -> None:
    with catch_interrupt() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
