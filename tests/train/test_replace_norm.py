"""Layer norm and group norm in the place of batch norm, against torch's own and closed forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from workbench.errors import UnknownNameError, UsageError
from workbench.train.batch_norm import replace_batch_norm


@pytest.mark.parametrize(("layer", "shape"), [(nn.BatchNorm1d, (5, 6)), (nn.BatchNorm1d, (5, 6, 3)), (nn.BatchNorm2d, (5, 6, 3, 2)), (nn.BatchNorm3d, (5, 6, 2, 2, 2))])  # fmt: skip
def test_layer_norm_is_that_of_torch_over_each_example(layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    x = 3 + torch.randn(*shape)
    found = replace_batch_norm(layer(6), "layer")(x)
    torch.testing.assert_close(found, nn.LayerNorm(shape[1:])(x))
    torch.testing.assert_close(replace_batch_norm(layer(6), "layer")(x[:1]), found[:1])


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(256, 32), (128, 32), (64, 16), (48, 12), (40, 10), (34, 2), (32, 8), (24, 6), (16, 4), (15, 3), (8, 2)],
)
def test_groups_are_as_many_as_divide_the_channels_and_leave_four_in_each(channels: int, groups: int) -> None:
    norm = replace_batch_norm(nn.BatchNorm2d(channels), "group")
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == groups
    x = torch.randn(3, channels, 2, 2)
    assert not torch.allclose(norm(x), replace_batch_norm(nn.BatchNorm2d(channels), "layer")(x)), "no layer norm"


@pytest.mark.parametrize("channels", [1, 4, 7, 17])
def test_channels_that_cannot_be_grouped_make_one_group(channels: int) -> None:
    norm = replace_batch_norm(nn.BatchNorm2d(channels), "group")
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == 1


def test_groups_may_be_limited() -> None:
    def groups(**limits: int) -> int:
        norm = replace_batch_norm(nn.BatchNorm2d(64), "group", **limits)
        assert isinstance(norm, nn.GroupNorm)
        return norm.num_groups

    assert groups(max_groups=8) == 8
    assert groups(max_groups=7) == 4
    assert groups(channels_per_group=16) == 4
    assert groups(max_groups=64, channels_per_group=1) == 64


def test_a_model_keeps_its_parameters_and_loses_its_running_statistics() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 1), nn.BatchNorm2d(8), nn.Sequential(nn.BatchNorm2d(8, affine=False, eps=1e-3))
    )
    parameters = list(model.parameters())
    assert replace_batch_norm(model, "group", channels_per_group=4) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not list(model.buffers())
    first, second = model[1], model[2][0]
    assert (first.num_groups, second.num_groups, second.affine, second.eps) == (2, 2, False, 1e-3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: replace_batch_norm(nn.BatchNorm1d(2), "layr"), UnknownNameError, "norm='layr' is not known.*layer"),
        (lambda: replace_batch_norm(nn.Linear(2, 2), "layer"), UsageError, "Linear has no batch norm layer"),
        (lambda: replace_batch_norm(nn.BatchNorm1d(2), "group", channels_per_group=0), UsageError, "channels_per_group=0"),
        (lambda: replace_batch_norm(nn.BatchNorm1d(2), "group", max_groups=True), UsageError, "max_groups=True"),
    ],
)  # fmt: skip
def test_what_cannot_be_replaced_says_so(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
