"""A batch taken apart and put together again is the same batch."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.step import split_batch, stack_batches

Pair = namedtuple("Pair", ["x", "y"])
X, Y = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2])
BATCHES: dict[str, Any] = {
    "tensor": X,
    "list": [X, Y],
    "tuple": (X, Y),
    "namedtuple": Pair(X, Y),
    "nested": {"a": [X, {"b": (Y, None)}], "c": 3, "d": "name", "e": torch.float32},
    "constants first": [1, 2.5, X, True, Y, b"x"],
    "empty": [],
}


@pytest.mark.parametrize("form", BATCHES)
def test_round_trip(form: str) -> None:
    tensors, layout = split_batch(BATCHES[form], 3)
    again = layout.rebuild(tensors)
    assert type(again) is type(BATCHES[form])
    assert str(again) == str(BATCHES[form])
    other = layout.rebuild([t + 1 for t in tensors])
    assert (str(other) == str(again)) == (not tensors)


def layout(batch: Any, examples: int = 3) -> Any:
    return split_batch(batch, examples)[1]


def test_equal_layouts_are_one_key() -> None:
    assert layout([X, Y, 1]) == layout([X + 5, Y * 2, 1])
    assert len({layout([X, Y]), layout([X + 1, Y + 1])}) == 1


@pytest.mark.parametrize(
    "other",
    [
        [X, Y, 2],
        [X, Y, 1.0],
        [X, Y, True],
        [X[:2], Y, 1],
        [X.double(), Y, 1],
        [X.t().contiguous().t(), Y, 1],
        (X, Y, 1),
        [Y, X, 1],
    ],
    ids=["value", "float", "bool", "shape", "type", "strides", "container", "order"],
)
def test_what_a_program_depends_on_is_in_the_key(other: Any) -> None:
    assert layout([X, Y, 1]) != layout(other)


def test_the_number_of_examples_is_in_the_key() -> None:
    assert layout([X], 3) != layout([X], 2)


def test_what_has_gaps_or_shares_elements_is_copied() -> None:
    for strange in (X.expand(4, 3, 2), torch.arange(12.0).view(3, 4)[:, ::2]):
        (tensor,), found = split_batch([strange], 3)
        assert tensor.is_contiguous()
        assert torch.equal(tensor, strange)
        assert found.tensors[0][1] == tensor.stride()


def test_batches_of_several_lanes_get_a_lane_axis() -> None:
    tensors, found = stack_batches([split_batch([X + k, Y], 3) for k in range(4)])
    assert [tuple(t.shape) for t in tensors] == [(4, 3, 2), (4, 3)]
    assert torch.equal(tensors[0][2], X + 2)
    assert found == layout([X, Y])


def test_batches_that_do_not_look_alike_are_refused() -> None:
    with pytest.raises(CannotBatch, match="batches of different shapes at the same step"):
        stack_batches([split_batch([X], 3), split_batch([X[:2]], 2)])


@pytest.mark.parametrize("strange", [object(), {1, 2}, X.numpy()])
def test_other_objects_are_refused(strange: Any) -> None:
    with pytest.raises(CannotBatch, match=f"the batch holds a {type(strange).__name__}"):
        split_batch([X, strange], 3)
