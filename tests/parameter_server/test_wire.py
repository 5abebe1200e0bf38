"""Values as they travel through Ray."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import pytest
import torch

from workbench.parameter_server.workers.wire import Packed, from_wire, to_bytes, to_wire


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = torch.ones(shape).to(dtype)
    found = from_wire(pickle.loads(pickle.dumps(to_wire({"a": [given, 1]}))))
    assert torch.equal(found["a"][0], given)
    assert found["a"][0].dtype is dtype
    found["a"][0].fill_(0)  # it is the reader's own, and may be written


def test_a_view_is_packed_alone() -> None:
    packed = to_wire(torch.arange(1000)[10:12])
    assert isinstance(packed, Packed)
    assert packed.content.nbytes == 16
    assert from_wire(packed).tolist() == [10, 11]


def test_sparse_tensors_are_left_to_pickle() -> None:
    sparse = torch.eye(2).to_sparse()
    assert to_wire(sparse) is sparse


def test_only_what_needs_it_is_packed_the_slow_way() -> None:
    asked = []

    def pack(value: Any) -> bytes:
        asked.append(value)
        content: bytes = cloudpickle.dumps(value)
        return content

    class Local:
        pass

    plain = (1, "a", [None, {"b": to_wire(torch.zeros(2))}])
    assert pickle.loads(to_bytes(plain, pack))[0] == 1
    assert not asked
    assert type(pickle.loads(to_bytes((1, [Local()]), pack))[1][0]).__name__ == "Local"
    assert len(asked) == 1
