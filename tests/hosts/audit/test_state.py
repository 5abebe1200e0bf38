"""Time in which a rank waits for the others is told from time in which it is busy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.hosts.audit.test_watch import seen
from workbench.topics.hosts.watch_state import State

WAIT_S = 0.05


def test_waiting_inside_of_waiting_counts_once(tmp_path: Path) -> None:
    state = State(tmp_path)
    began = time.perf_counter()
    with state.waiting("all_gather_object"), state.waiting("all_gather"):
        time.sleep(WAIT_S)
        assert state.phase == "waiting in all_gather_object"
    assert WAIT_S <= state.waited_s <= time.perf_counter() - began
    assert state.phase == "starting"


def test_where_waiting_fails_is_where_the_rank_was(tmp_path: Path) -> None:
    state = State(tmp_path)
    with pytest.raises(RuntimeError), state.waiting("barrier"):
        raise RuntimeError("closed by peer")
    assert state.phase == "waiting in barrier"
    with state.waiting("all_reduce"):
        assert state.phase == "waiting in all_reduce"


def test_a_rank_is_not_busy_while_its_last_gradient_is_averaged(alone: None, tmp_path: Path) -> None:
    def slow(_: Any, bucket: Any) -> Any:
        time.sleep(WAIT_S)  # as where another rank comes later
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    slow.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}  # torch reads them

    def work() -> None:
        model = DistributedDataParallel(nn.Linear(3, 1))
        model.register_comm_hook(None, slow)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    times = seen(tmp_path / "facts", work)["times"]
    assert len(times["busy_s"]) == 3
    assert all(step - busy >= 0.9 * WAIT_S for step, busy in zip(times["step_s"], times["busy_s"], strict=True))
