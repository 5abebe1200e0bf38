"""Channels last: the same images, laid out otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.graphs import assert_equal, record
from workbench.train.traced.graph.images import channels_last
from workbench.train.traced.graph.tidy import tidy

G = torch.Generator().manual_seed(3)


def strides_of_convolutions(graph: object) -> list[int]:
    nodes = [n for n in graph.graph.nodes if "convolution" in str(n.target)]  # type: ignore[attr-defined]
    return [n.args[0].meta["tensor"].stride[1] for n in nodes]


@pytest.mark.parametrize("channels", [1, 3])
def test_images_and_all_that_follows_have_their_channels_last(channels: int) -> None:
    x = torch.randn(4, channels, 8, 8, generator=G)
    w, v = torch.randn(5, channels, 3, 3, generator=G), torch.randn(6, 5, 3, 3, generator=G)
    b = torch.randn(5, generator=G)

    def function(w: Tensor, v: Tensor, b: Tensor, x: Tensor) -> Tensor:
        h = F.batch_norm(F.conv2d(x, w, b, padding=1), None, None, training=True).relu()
        return F.max_pool2d(F.conv2d(h, v, padding=1), 2).flatten(1)

    graph = record(function, [w, v, b], [x])
    channels_last(graph.graph)
    graph.refresh()
    tidy(graph.graph)
    assert_equal(graph.run(), graph.results, 1e-5)
    assert strides_of_convolutions(graph) == [1, 1]
    layouts = [n.meta["tensor"].stride[1] for n in graph.graph.nodes if "relu" in str(n.target)]
    assert layouts == [1]


def test_gradients_too() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.Flatten()
    )
    parameters = [p.detach() for p in net.parameters()]
    names = [name for name, _ in net.named_parameters()]

    def function(*tensors: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors[:-1]]
        with torch.enable_grad():
            out = torch.func.functional_call(net, dict(zip(names, leaves, strict=True)), tensors[-1])
            return list(torch.autograd.grad(out.square().sum(), leaves))

    graph = record(function, parameters, [torch.randn(5, 1, 8, 8, generator=G)])
    channels_last(graph.graph)
    graph.refresh()
    assert_equal(graph.run(), graph.results, 1e-5)


def test_float64_and_other_dimensions_stay() -> None:
    double = record(lambda w, x: F.conv2d(x, w), [torch.randn(2, 1, 3, 3).double()], [torch.randn(2, 1, 5, 5).double()])
    line = record(lambda w, x: F.conv1d(x, w), [torch.randn(2, 3, 3)], [torch.randn(2, 3, 7)])
    for graph in (double, line):
        before = graph.targets()
        channels_last(graph.graph)
        assert graph.targets() == before
