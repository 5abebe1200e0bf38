"""Each lane draws, bit for bit, what the same trial draws when it is trained alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.lane_models import CLASSES, FEATURES, lane_workload
from tests.helpers.lane_stacks import assert_same, lane_stack, loop, run, updates
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.run import VmapGradients
from workbench.train.rng import isolated_rng, restore_rng

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(torch.ones_like(h), 0.4),
    "after_one_that_nobody_needs": lambda h: (torch.rand(3), F.dropout(torch.ones_like(h), 0.4))[1],
    "dropout_of_the_input": lambda h: F.dropout(h.detach() * 0 + 1, 0.4),
    "channel_dropout": lambda h: F.dropout2d(torch.ones_like(h)[..., None, None], 0.4)[..., 0, 0],
    "transposed": lambda h: F.dropout(torch.ones_like(h).t(), 0.4).t(),
    "rand": lambda h: torch.rand(h.shape, dtype=h.dtype),
    "rand_like": torch.rand_like,
    "randn": lambda h: torch.randn(8, dtype=h.dtype) + 0 * h,
    "randn_like": torch.randn_like,
    "normal": lambda h: torch.empty_like(h).normal_(1.0, 2.0),
    "uniform": lambda h: torch.empty_like(h).uniform_(-3, 2),
    "exponential": lambda h: torch.empty_like(h).exponential_(0.5),
    "randint": lambda h: torch.randint(0, 9, h.shape) + 0 * h,
    "randint_from": lambda h: torch.randint(3, 9, h.shape) + 0 * h,
    "bernoulli": lambda h: torch.bernoulli(torch.sigmoid(h.detach())),
    "multinomial": lambda h: torch.multinomial(torch.softmax(h.detach(), -1), 8, replacement=True).to(h.dtype),
    "gumbel": lambda h: F.gumbel_softmax(h.detach()),
    "poisson": lambda h: torch.poisson(torch.ones_like(h)),
}


class Drawing(nn.Module):
    """Keeps what it drew in a buffer, where it can be read."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.register_buffer("drawn", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        drawn = self.draw(h)
        with torch.no_grad():
            self.drawn.copy_(drawn)
        out: Tensor = self.head(h * drawn)
        return out


@pytest.mark.parametrize(("per_call", "dtype"), [(1, torch.float64), (3, torch.float32)], ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_every_kind_of_draw(name: str, per_call: int, dtype: torch.dtype) -> None:
    workload = lane_workload(lambda: Drawing(DRAWS[name]), dtype=dtype)
    stack, steps = lane_stack(workload, 3), updates(workload, 2)
    if name == "multinomial" and per_call > 1:  # vmap draws for all lanes as if they were one
        with pytest.raises(CannotBatch, match="in a way that lanes cannot do together"):
            VmapGradients(workload, stack, lanes_per_call=per_call)(steps[0])
        return
    expected = loop(workload, stack, steps)
    found = run(stack, VmapGradients(workload, stack, lanes_per_call=per_call), steps)
    assert_same(found, expected, 1e-5)
    for ours, plain in zip(found, expected, strict=True):
        if name in ("bernoulli", "gumbel", "multinomial"):  # these compute with numbers that rounding may touch
            torch.testing.assert_close(ours.buffers["drawn"], plain.buffers["drawn"], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(ours.buffers["drawn"], plain.buffers["drawn"])
    assert not torch.equal(found[0].buffers["drawn"][0], found[0].buffers["drawn"][1])
    assert not torch.equal(found[0].buffers["drawn"], found[1].buffers["drawn"])


def test_the_mask_is_the_one_that_the_lanes_generator_gives() -> None:
    """Against torch itself: the generator's state in the global generator, and a mask drawn by hand."""
    workload = lane_workload(lambda: Drawing(DRAWS["dropout"]), dtype=torch.float32)
    stack, steps = lane_stack(workload, 3), updates(workload, 1)
    states = [stack.rng.state(lane) for lane in range(3)]
    torch.manual_seed(11)
    before = torch.get_rng_state()
    (seen,) = run(stack, VmapGradients(workload, stack, lanes_per_call=3), steps)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    for lane, state in enumerate(states):
        with isolated_rng():
            restore_rng(state)
            mask = F.dropout(torch.ones(8, 8), 0.4)
        assert torch.equal(seen.buffers["drawn"][lane], mask)
