"""A traced step is plain autograd in another form: every kind of model, any number of lanes, any division into calls."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.lane_models import MODELS, lane_workload
from tests.helpers.lane_stacks import assert_same, lane_stack, loop, run, updates
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.run import VmapGradients

ALONE = ("lstm", "gru", "spectral_norm")  # torch.func.vmap knows no rule for what these call
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("lanes", "per_call"), [(1, 1), (2, 2), (5, 5), (5, 2), (2, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_plain_autograd(name: str, lanes: int, per_call: int, dtype: torch.dtype) -> None:
    workload = lane_workload(MODELS[name], dtype=dtype)
    stack, steps = lane_stack(workload, lanes), updates(workload, 2)
    if name in ALONE and per_call > 1:
        with pytest.raises(CannotBatch, match="lanes cannot be batched"):
            VmapGradients(workload, stack, lanes_per_call=per_call)(steps[0])
        return
    expected = loop(workload, stack, steps)
    found = run(stack, VmapGradients(workload, stack, lanes_per_call=per_call), steps)
    assert_same(found, expected, TOLERANCE[dtype])
