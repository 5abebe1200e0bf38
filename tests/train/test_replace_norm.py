"""Layer norm and group norm in the place of batch norm, against torch's own and closed forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from workbench.errors import UnknownNameError, UsageError
from workbench.train.replace_norm import replace_batch_norm


@pytest.mark.parametrize(("layer", "shape"), [(nn.BatchNorm1d, (5, 6)), (nn.BatchNorm1d, (5, 6, 3)), (nn.BatchNorm2d, (5, 6, 3, 2)), (nn.BatchNorm3d, (5, 6, 2, 2, 2))])  # fmt: skip
def test_layer_norm_is_that_of_torch_over_each_example(layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    x = 3 + torch.randn(*shape)
    found = replace_batch_norm(layer(6), "layer")(x)
    torch.testing.assert_close(found, nn.LayerNorm(shape[1:])(x))
    torch.testing.assert_close(replace_batch_norm(layer(6), "layer")(x[:1]), found[:1])


@pytest.mark.parametrize(
    ("channels", "groups"), [(64, 4), (32, 2), (48, 3), (40, 2), (16, 1), (8, 1), (17, 1), (34, 2)]
)
def test_groups_divide_the_channels_and_have_at_least_sixteen(channels: int, groups: int) -> None:
    norm = replace_batch_norm(nn.BatchNorm2d(channels), "group")
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == groups


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
    ],
)  # fmt: skip
def test_what_cannot_be_replaced_says_so(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
