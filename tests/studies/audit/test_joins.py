"""Residual joins of models whose architecture is known by construction: torch's own layers and small twins of published ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.topics.architecture.dataflow import trace_dataflow
from workbench.topics.architecture.joins import Join, Operations, find_joins


def joins_of(model: nn.Module, *inputs: Tensor) -> list[Join]:
    torch.manual_seed(0)
    return find_joins(trace_dataflow(model, lambda: model(*inputs), inputs))


class Function(nn.Module):
    """A model of a few layers, from a function of them and the input."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def two_layers(function: Callable[..., Any], **more: nn.Module | nn.Parameter) -> Function:
    return Function(function, one=nn.Linear(8, 8), two=nn.Linear(8, 8), **more)


def branch(m: Any, x: Tensor) -> Tensor:
    return m.two(F.relu(m.one(x)))


def in_place(m: Any, x: Tensor) -> Tensor:
    h = x * 1.0
    h += branch(m, h)
    return h


def into_a_slice(m: Any, x: Tensor) -> Tensor:
    h = x.clone()
    h[:, :4] += branch(m, h)[:, :4]
    return m.two(h)


X = torch.randn(5, 8)
IMAGE = torch.randn(2, 4, 8, 8)
SEQUENCE = torch.randn(3, 6, 8)


@pytest.mark.parametrize(
    "add",
    [
        lambda m, x: x + branch(m, x),
        lambda m, x: branch(m, x) + x,
        lambda m, x: torch.add(x, branch(m, x), alpha=0.5),
        lambda m, x: x - branch(m, x),
        lambda m, x: torch.addcmul(x, branch(m, x), torch.full((8,), 0.1)),
        lambda m, x: sum([x, branch(m, x)]),
        in_place,
        into_a_slice,
        lambda m, x: F.dropout(branch(m, x), 0.5) + x,
        lambda m, x: torch.utils.checkpoint.checkpoint(branch, m, x, use_reentrant=False) + x,
    ],
)
def test_every_way_to_add_is_found(add: Callable[..., Tensor]) -> None:
    (join,) = joins_of(two_layers(add), X)
    assert (join.skip, join.placement, join.layers, join.last_weight) == ("identity", "none", 2, "two.weight")
    assert join.norm is None


def test_the_sizes_are_those_of_the_summands() -> None:
    model = two_layers(lambda m, x: branch(m, x) + x)
    (join,) = joins_of(model, X)
    added = branch(model, X)
    for found, tensor in ((join.skip_rms, X), (join.branch_rms, added), (join.sum_rms, X + added)):
        assert found == pytest.approx(float(tensor.square().mean().sqrt().detach()), rel=1e-5)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, 2), nn.Linear(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


def attention_by_hand(m: Any, x: Tensor) -> Tensor:
    scores = m.one(x) @ m.two(x).transpose(-2, -1) + torch.full((6, 6), -1.0).triu(1)
    return scores.softmax(-1) @ x


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), X),
        (two_layers(lambda m, x: m.two(torch.cat([x[:, :4], m.one(x)[:, :4]], 1))), X),  # as in DenseNet
        (nn.Sequential(nn.Conv2d(4, 4, 3), SqueezeExcite(4)), IMAGE),
        (two_layers(lambda m, x: m.one(x) + m.two(x)), X),  # two towers
        (two_layers(lambda m, x: m.one(x) * x), X),
        (two_layers(lambda m, x: m.two(x + x)), X),
        (two_layers(lambda m, x: m.one(x) + 1.0), X),
        (two_layers(lambda m, x: 0.5 * x * (1 + torch.tanh(x + 0.044 * x**3))), X),  # an activation written out
        (two_layers(attention_by_hand), SEQUENCE),
        (two_layers(lambda m, x: ((x - branch(m, x)) ** 2).mean(-1)), X),  # the error of a reconstruction
        (Function(lambda m, t: m.a(t) + m.b(t % 4), a=nn.Embedding(9, 8), b=nn.Embedding(4, 8)), torch.arange(6)),
        (nn.LSTM(8, 8, num_layers=2), SEQUENCE),
        (nn.GRU(8, 8), SEQUENCE),
        (nn.GRUCell(8, 8), X),
        (nn.MultiheadAttention(8, 2), None),
    ],
)  # fmt: skip
def test_what_is_no_residual_connection(model: nn.Module, x: Tensor | None) -> None:
    assert joins_of(model, *([SEQUENCE] * 3 if x is None else [x])) == []


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_torchs_transformer_layer(norm_first: bool, training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8) if norm_first else None, enable_nested_tensor=False)
    joins = joins_of(model.train(training), SEQUENCE)
    assert [j.placement for j in joins] == ["pre" if norm_first else "after_add"] * 6
    assert [j.norm for j in joins] == [f"layers.{k}.norm{i}" for k in range(3) for i in (1, 2)]
    ends = ("self_attn.out_proj.weight", "linear2.weight")
    assert [j.last_weight for j in joins] == [f"layers.{k}.{end}" for k in range(3) for end in ends]
    assert [j.layers for j in joins] == [2] * 6


def test_torchs_encoder_and_decoder() -> None:
    model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    joins = joins_of(model, SEQUENCE, SEQUENCE)
    assert [j.module for j in joins] == [f"encoder.layers.{k}" for k in (0, 0, 1, 1)] + [
        f"decoder.layers.{k}" for k in (0, 0, 0, 1, 1, 1)
    ]
    assert {j.placement for j in joins} == {"after_add"}


class Basic(nn.Module):
    """The basic block of He et al. 2016, or with `pre` that of their second paper."""

    def __init__(self, ins: int, outs: int, stride: int = 1, *, pre: bool = False) -> None:
        super().__init__()
        self.pre = pre
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(ins if pre else outs), nn.BatchNorm2d(outs)
        if stride > 1:
            down = nn.Conv2d(ins, outs, 1, stride, bias=False)
            self.down: nn.Module = down if pre else nn.Sequential(down, nn.BatchNorm2d(outs))
        else:
            self.down = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            before = F.relu(self.bn1(x))
            skip = x if isinstance(self.down, nn.Identity) else self.down(before)
            return skip + self.conv2(F.relu(self.bn2(self.conv1(before))))
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.down(x))


@pytest.mark.parametrize(("pre", "placement"), [(False, "branch"), (True, "pre")])
def test_residual_networks_of_both_papers(pre: bool, placement: str) -> None:
    blocks = [Basic(4, 4, pre=pre), Basic(4, 8, 2, pre=pre), Basic(8, 8, pre=pre)]
    model = nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), *blocks, nn.BatchNorm2d(8), nn.ReLU())
    joins = joins_of(model, IMAGE)
    assert [(j.module, j.skip, j.placement) for j in joins] == [
        ("1", "identity", placement), ("2", "projection", placement), ("3", "identity", placement)
    ]  # fmt: skip
    assert [j.norm for j in joins] == [f"{k}.{'bn1' if pre else 'bn2'}" for k in (1, 2, 3)]


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def layer_norm_by_hand(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()


NORMS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "RMSNorm by hand": RMSNorm,
    "F.layer_norm": lambda: lambda x: F.layer_norm(x, (8,)),
    "F.rms_norm": lambda: lambda x: F.rms_norm(x, (8,)),
    "F.normalize": lambda: lambda x: F.normalize(x, dim=-1),
    "a layer norm by hand": lambda: layer_norm_by_hand,
    "an RMS norm by hand": lambda: lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "division by the deviation": lambda: lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
}


class Stack(nn.Module):
    def __init__(self, norm: Callable[[], Callable[[Tensor], Tensor]], placement: str) -> None:
        super().__init__()
        self.placement = placement
        self.ones = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.norms = [norm() for _ in range(4)]
        self.modules_of_norms = nn.ModuleList([n for n in self.norms if isinstance(n, nn.Module)])

    def forward(self, x: Tensor) -> Tensor:
        for one, norm in zip(self.ones, self.norms, strict=False):
            if self.placement == "branch":
                x = x + norm(F.relu(one(x)))
            elif self.placement == "after_add":
                x = norm(x + F.relu(one(x)))
            elif self.placement == "pre":
                x = x + F.relu(one(norm(x)))
            elif self.placement == "inside":
                x = x + F.relu(norm(one(x)))
        return self.norms[3](x) if self.placement == "pre" else x


@pytest.mark.parametrize("placement", ["branch", "after_add", "pre", "inside"])
@pytest.mark.parametrize("name", NORMS)
def test_every_norm_is_seen_in_every_place(name: str, placement: str) -> None:
    model = Stack(NORMS[name], placement)
    assert [j.placement for j in joins_of(model, X)] == [placement] * 3


def test_without_a_norm_none_is_seen() -> None:
    """Softmax, a mean and a division by a constant normalise nothing."""
    model = two_layers(lambda m, x: x + m.two(m.one(x).softmax(-1) * x.mean() / 3.0 - x.mean(-1, keepdim=True)))
    flow = trace_dataflow(model, lambda: model(X), X)
    assert Operations(flow).norms == []
    assert [j.placement for j in find_joins(flow)] == ["none"]


def test_the_last_norm_of_a_network_belongs_to_no_block() -> None:
    """x + Norm(f(x)) with a norm before the head, and x + f(Norm(x)) with one: neither is Norm(x + f(x))."""
    blocks = two_layers(lambda m, x: m.last(x + m.norm(branch(m, x))), norm=nn.LayerNorm(8), last=nn.LayerNorm(8))
    assert [(j.placement, j.norm) for j in joins_of(blocks, X)] == [("branch", "norm")]
    pre = two_layers(lambda m, x: m.last(x + branch(m, m.norm(x))), norm=nn.LayerNorm(8), last=nn.LayerNorm(8))
    assert [(j.placement, j.norm) for j in joins_of(pre, X)] == [("pre", "norm")]


def test_branches_side_by_side_are_two_joins() -> None:
    """x + attention(Norm(x)) + mlp(Norm(x)), with one norm for both."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm(x)
        return x + m.one(h) + m.two(F.relu(m.three(h)))

    joins = joins_of(two_layers(forward, norm=nn.LayerNorm(8), three=nn.Linear(8, 8)), X)
    assert [(j.skip, j.placement, j.layers) for j in joins] == [("identity", "pre", 1), ("identity", "pre", 2)]


def test_experts_that_are_summed_are_one_branch() -> None:
    """x + sum of gate_i(h) * expert_i(h), h = Norm(x): the sums among the experts add equals."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm(x)
        gate = m.gate(h).softmax(-1)
        return x + sum((gate[:, i : i + 1] * expert(h) for i, expert in enumerate(m.experts)), torch.zeros(8))

    experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)])
    joins = joins_of(Function(forward, norm=nn.LayerNorm(8), gate=nn.Linear(8, 4), experts=experts), X)
    assert [(j.skip, j.placement, j.layers) for j in joins] == [("identity", "pre", 2)]


def test_a_norm_behind_the_first_layer_of_a_branch_is_inside() -> None:
    """As in ConvNeXt: a depthwise convolution, a norm, two layers and a small gain."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm(m.depthwise(x).permute(0, 2, 3, 1))
        return x + (m.gain * m.two(F.gelu(m.one(h)))).permute(0, 3, 1, 2)

    layers = {"depthwise": nn.Conv2d(4, 4, 3, padding=1, groups=4), "norm": nn.LayerNorm(4), "one": nn.Linear(4, 16)}
    (join,) = joins_of(
        Function(forward, **layers, two=nn.Linear(16, 4), gain=nn.Parameter(torch.full((4,), 1e-6))), IMAGE
    )
    assert (join.placement, join.norm, join.layers, join.zero_parameters) == ("inside", "norm", 3, ())
    assert 0 < join.branch_rms < 1e-5


def test_a_highway_is_a_gated_skip() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(m.two(x))
        return gate * torch.relu(m.one(x)) + (1 - gate) * x

    (join,) = joins_of(two_layers(forward), X)
    assert join.skip == "identity"


def test_the_additions_of_a_u_net_are_long_residual_connections() -> None:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            high = F.relu(self.a(x))
            low = F.relu(self.b(F.max_pool2d(high, 2)))
            up = F.interpolate(F.relu(self.c(low)), scale_factor=2)
            out: Tensor = self.d(up + high)
            return out

    (join,) = joins_of(UNet(), IMAGE)
    assert (join.skip, join.layers, join.last_weight) == ("identity", 2, "c.weight")


def test_outputs_in_a_dict_and_inputs_in_a_dict() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
            hidden = batch["x"] + self.one(batch["x"])
            return {"logits": hidden, "more": [hidden, batch["mask"]]}

    model, batch = Net(), {"x": X, "mask": torch.ones(5, dtype=torch.bool)}
    (join,) = find_joins(trace_dataflow(model, lambda: model(batch), batch))
    assert (join.module, join.last_weight) == ("", "one.weight")


@pytest.mark.parametrize(
    ("model", "zeros"),
    [
        (two_layers(lambda m, x: x + m.alpha * branch(m, x), alpha=nn.Parameter(torch.zeros(()))), ("alpha",)),  # ReZero
        (two_layers(lambda m, x: x + branch(m, x) * m.gain, gain=nn.Parameter(torch.zeros(8))), ("gain",)),  # SkipInit
        (two_layers(lambda m, x: x + torch.tanh(m.alpha) * branch(m, x), alpha=nn.Parameter(torch.zeros(()))), ("alpha",)),
    ],
)  # fmt: skip
def test_scalars_of_zero_end_a_branch(model: nn.Module, zeros: tuple[str, ...]) -> None:
    (join,) = joins_of(model, X)
    assert join.branch_rms == 0
    assert join.zero_parameters == zeros


@pytest.mark.parametrize("end", ["two.weight", "norm.weight"])
def test_a_last_weight_or_a_gain_of_zero_ends_a_branch(end: str) -> None:
    model = two_layers(lambda m, x: x + m.norm(branch(m, x)), norm=nn.LayerNorm(8))
    nn.init.zeros_(model.get_parameter(end))
    nn.init.zeros_(model.get_parameter("two.bias"))
    (join,) = joins_of(model, X)
    assert join.branch_rms == 0
    assert join.zero_parameters == (end,)


def test_a_bias_of_zero_makes_no_branch_zero() -> None:
    model = two_layers(lambda m, x: x + m.norm(branch(m, x)), norm=nn.LayerNorm(8))
    for name in ("one.bias", "two.bias", "norm.bias"):
        nn.init.zeros_(model.get_parameter(name))
    (join,) = joins_of(model, X)
    assert join.branch_rms > 0.5
    assert join.zero_parameters == ()


def test_depth_counts_weight_layers_on_the_longest_way() -> None:
    """A transformer layer has four: the projections of attention, one after the other, and the two of its network."""
    models: list[tuple[nn.Module, Tensor, int]] = [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), X, 2),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), SEQUENCE, 4),
        (two_layers(lambda m, x: m.one(x) + m.two(x)), X, 1),
        (nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)), IMAGE, 2),
        (nn.LSTM(8, 8, num_layers=2), SEQUENCE, 2),
    ]
    for model, x, depth in models:
        assert max(Operations(trace_dataflow(model, lambda m=model, x=x: m(x), x)).depth) == depth
