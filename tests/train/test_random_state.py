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
from torch import nn
from torch.utils.data import TensorDataset

from tests.helpers.workloads import small_net, small_workload
from workbench.progress import catch_interrupt
from workbench.record.write import StudyWriter
from workbench.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from workbench.train.rng import capture_rng, isolated_rng, restore_rng, seed_all
from workbench.train.trainer import Trainer


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


class DrawsOnHost(nn.Module):
    """Adds numbers of NumPy and Python from its `first` pass on, in training or in evaluation alone."""

    def __init__(self, first: int, in_training: bool) -> None:
        super().__init__()
        self.net, self.first, self.in_training = small_net().double(), first, in_training
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    passes: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training is self.in_training:
            self.passes.add_(1)
            if int(self.passes) > self.first:
                x = x + 0.5 * np.random.randn() + random.random()
        out: torch.Tensor = self.net(x)
        return out


@pytest.mark.parametrize(
    ("in_training", "first", "evaluation_batches"),
    [(True, 0, 6), (True, 2, 1), (True, 15, 1), (False, 2, 1), (False, 15, 6)],
)
def test_what_a_model_draws_from_numpy_is_the_same_in_a_sweep_and_alone(
    tmp_path: Path, in_training: bool, first: int, evaluation_batches: int
) -> None:
    given = small_workload(
        examples=96,
        build_model=lambda: DrawsOnHost(first, in_training),
        validation_data=TensorDataset(torch.ones(48, 3), torch.ones(48)),
        config={"eval_batch_size": 48 // evaluation_batches, "eval_every_steps": 2, "checkpoint_every_steps": 8},
    )
    configs = [given.config.replace(peak_lr=0.01, per_host_seed=seed) for seed in (0, 0, 1)]
    configs[1] = configs[1].replace(peak_lr=0.02)
    study = StudyWriter.open(tmp_path / "sweep", kind="lr_sweep", workload=given.name, config=given.config.to_dict())
    together = Trainer(gradients="loop").run_trials(given, configs, study, stage="lr_sweep")
    study.close()
    for number, (config, record) in enumerate(zip(configs, together, strict=True)):
        alone = Trainer(gradients="loop").run(given, config, out=tmp_path / str(number))
        assert record.steps["loss"].tolist() == alone.steps["loss"].tolist()
        assert record.evals["value"].tolist() == alone.evals["value"].tolist()
        assert record.state == "complete"
