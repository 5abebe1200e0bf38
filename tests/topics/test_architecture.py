"""Architecture: residual joins of models that are known by construction, what an audit leaves as it was, verdicts, variants over depth, and their picture."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.records import MemoryRecord, empty
from tests.helpers.workloads import small_workload
from workbench.config import TrainConfig
from workbench.errors import ConfigError, WorkloadError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.plots.style import why_not_measured
from workbench.record.json_values import dumps
from workbench.topics.architecture.dataflow import trace_dataflow
from workbench.topics.architecture.diagnose import CODES, excused_architecture
from workbench.topics.architecture.joins import Join, Operations, find_joins
from workbench.topics.architecture.study import VARIANTS, collect_architecture
from workbench.workloads.analytic import half_squared_length
from workbench.workloads.base import Workload
from workbench.workloads.sklearn_data import deep_residual

CPU = torch.device("cpu")


# Joins.


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


X, IMAGE, SEQUENCE = torch.randn(5, 8), torch.randn(2, 4, 8, 8), torch.randn(3, 6, 8)


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


@pytest.mark.parametrize(
    ("model", "zeros"),
    [
        (
            two_layers(lambda m, x: x + m.alpha * branch(m, x), alpha=nn.Parameter(torch.zeros(()))),
            ("alpha",),
        ),  # ReZero
        (two_layers(lambda m, x: x + branch(m, x) * m.gain, gain=nn.Parameter(torch.zeros(8))), ("gain",)),  # SkipInit
        (two_layers(lambda m, x: x + m.norm(branch(m, x)), norm=nn.LayerNorm(8)), ("two.weight",)),
        (two_layers(lambda m, x: x + m.norm(branch(m, x)), norm=nn.LayerNorm(8)), ("norm.weight",)),
        (two_layers(lambda m, x: x + m.norm(branch(m, x)), norm=nn.LayerNorm(8)), ()),  # biases of zero make none
    ],
)
def test_what_ends_a_branch_with_zero_is_named(model: nn.Module, zeros: tuple[str, ...]) -> None:
    for name, p in model.named_parameters():
        if name in zeros or name.endswith("bias"):
            nn.init.zeros_(p)
    (join,) = joins_of(model, X)
    assert (join.branch_rms == 0) == bool(zeros)
    assert join.zero_parameters == zeros


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


# The traced forward pass, and the audit.


class Restless(nn.Module):
    """Batch norm, dropout, draws of three generators, a buffer that is replaced, one that is written into."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(6, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(0.5),
            nn.Linear(6, 2),
        )
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.full((6,), float("nan")))
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.mean.copy_(x.mean(0))
        x = self.drop(self.norm(self.first(x))) + random.random() + float(np.random.rand())
        if self.error is not None:
            raise self.error("stop here")
        out: Tensor = self.last(x + torch.randn_like(x))
        return out


def state(model: nn.Module) -> dict[str, Any]:
    members = [*model.named_parameters(), *model.named_buffers()]
    return {
        "values": {name: t.detach().numpy().tobytes() for name, t in members},
        "tensors": {name: id(t) for name, t in members},
        "modes": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "global hooks": (len(module_hooks._global_forward_hooks), len(module_hooks._global_forward_pre_hooks)),
        "gradients": [p.grad for p in model.parameters()],
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tobytes()),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_everything_is_left_as_it_was(error: type[BaseException] | None, training: bool) -> None:
    model, x = Restless(error).train(training), torch.randn(4, 6)
    before = state(model)
    if error is None:
        trace_dataflow(model, lambda: model(x), x)
    else:
        with pytest.raises(error, match="stop here"):
            trace_dataflow(model, lambda: model(x), x)
    assert state(model) == before


def test_nodes_name_operation_parameters_and_module() -> None:
    model, x = nn.Sequential(nn.Linear(6, 3), nn.ReLU()), torch.randn(4, 6)
    flow = trace_dataflow(model, lambda: model(x), x)
    (product,) = [at for at, node in enumerate(flow.nodes) if node.op == "addmm"]
    assert {p.name for p in flow.parameters(product)} == {"0.weight", "0.bias"}
    assert {p.name for p in flow.parameters(product, without=("self",))} == {"0.weight"}
    assert flow.nodes[product].module == "0"
    assert flow.nodes[product].shape == (4, 3)
    (relu,) = [at for at, node in enumerate(flow.nodes) if node.op == "relu"]
    assert flow.data(relu) == [product]
    assert flow.users[product] == [relu]
    assert flow.modules == {"": nn.Sequential, "0": nn.Linear, "1": nn.ReLU}


def workload_of(build_model: Callable[[], nn.Module]) -> Workload:
    return small_workload().replace(build_model=build_model)


def inputs() -> int:
    return int(small_workload().train_data[0][0].numel())


class Dropped(nn.Module):
    """A branch that is dropped as a whole in training, by chance."""

    def __init__(self, *, zero: bool) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(inputs(), inputs()), nn.Linear(inputs(), 4)
        self.scale = nn.Parameter(torch.zeros(()) if zero else torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        kept = 0.0 if self.training else 1.0
        out: Tensor = self.head(x + kept * self.scale * self.one(x))
        return out


@pytest.mark.parametrize("zero", [True, False])
def test_a_branch_that_was_dropped_by_chance_does_not_begin_at_zero(zero: bool) -> None:
    workload = workload_of(lambda: Dropped(zero=zero))
    (join,) = collect_architecture(workload, workload.config, CPU)["joins"]
    assert (join["branch_rms"] == 0) == zero
    assert join["zero_parameters"] == (("scale",) if zero else ())


class Net(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.one, self.norm, self.call = nn.Linear(inputs(), 4), nn.LayerNorm(4), forward

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x.flatten(1))


def raises(model: Any, x: Tensor) -> None:
    torch.rand(1)
    raise RuntimeError("cannot be told\nin one line")


def test_what_cannot_be_traced_says_why() -> None:
    def facts(build: Callable[[], nn.Module]) -> dict[str, Any]:
        workload = workload_of(build)
        return collect_architecture(workload, workload.config, CPU)

    before = torch.get_rng_state()
    assert facts(lambda: Net(raises))["reason"] == "the forward pass cannot be traced (RuntimeError: cannot be told)"
    past = facts(lambda: Net(lambda m, x: m.one(torch.from_numpy(x.numpy().copy()))))
    assert "by a way that is no operation on them" in past["reason"]
    idle = facts(lambda: Net(lambda m, x: m.one(x)))
    assert (idle["norm_modules"], idle["norms"]) == (["norm"], [])
    assert torch.equal(before, torch.get_rng_state())

    def broken() -> nn.Module:
        raise ValueError("no such layer")

    with pytest.raises(WorkloadError, match="no such layer"):
        facts(broken)


# Verdicts.


def record_of(facts: dict[str, Any]) -> MemoryRecord:
    record = empty()
    record.facts = json.loads(dumps(facts))
    return record


def audit(workload: Workload) -> MemoryRecord:
    return record_of({"architecture": collect_architecture(workload, workload.config, torch.device("cpu"))})


def statuses(diagnosis: Diagnosis) -> dict[str, str]:
    assert {f.code: f.clause for f in diagnosis} == CODES
    return {f.code.removeprefix("architecture."): f.status for f in diagnosis if f.status != "ok"}


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"residual": False}, {"no_residual", "no_norm"}),
        ({"residual": False, "norm": "branch"}, {"no_residual"}),
        ({}, {"no_norm", "branch_not_zero"}),
        ({"norm": "branch"}, set()),
        ({"norm": "pre"}, set()),
        ({"norm": "after_add"}, {"norm_after_add"}),
        ({"zero_init": True}, set()),
        ({"norm": "branch", "zero_init": True}, set()),
        ({"norm": "branch", "depth": 24}, {"branch_not_zero"}),
        ({"depth": 2}, set()),
        ({"depth": 2, "residual": False}, set()),
        ({"depth": 2, "norm": "after_add"}, set()),
    ],
)
def test_each_practice_that_a_deep_network_lacks_is_named(options: dict[str, Any], warned: set[str]) -> None:
    diagnosis = wb.architecture.diagnose(audit(deep_residual(**options)))
    assert statuses(diagnosis) == dict.fromkeys(warned, "warn")
    for finding in diagnosis:
        assert finding.clause in ("F2.5", "F2.7", "F2.8")
        assert "traced forward pass" in finding.evidence["source"]
        assert bool(finding.advice) == (finding.status == "warn")


@pytest.mark.parametrize("name", ["digits_resnet", "source_text", "breast_cancer", "quadratic"])
def test_healthy_and_shallow_models_get_no_warning(name: str) -> None:
    assert statuses(wb.architecture.diagnose(audit(wb.load_workload(name)))) == {}


def test_the_evidence_names_modules_and_numbers() -> None:
    diagnosis = wb.architecture.diagnose(audit(wb.load_workload("source_text_post_norm")))
    after = diagnosis["architecture.norm_after_add"]
    assert after.status == "warn"
    assert after.value == 24
    assert after.evidence["norms"][:3] == ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1"]
    assert after.evidence["placements"] == {"after_add": 24}
    assert diagnosis["architecture.no_residual"].evidence["weight_layers"] == 1 + 12 * 4 + 1
    zero = wb.architecture.diagnose(audit(deep_residual(zero_init=True)))["architecture.branch_not_zero"]
    assert zero.evidence["zero_parameters"][0] == "blocks.0.outer.weight"
    assert zero.evidence["begin_at_zero"] == 12


def test_the_growth_is_that_of_the_variance() -> None:
    """12 branches of equal size without a norm double it each time, with x + Norm(f(x)) they add 1 to it each time."""
    for options, growth in (({"width": 512}, 2**6), ({"width": 512, "norm": "branch"}, 13**0.5)):
        found = wb.architecture.diagnose(audit(deep_residual(**options)))["architecture.branch_not_zero"]  # type: ignore[arg-type]
        assert found.value == pytest.approx(growth, rel=0.15)


@pytest.mark.parametrize("reason", [None, "the model is written in another language"])
def test_what_was_not_audited_or_is_not_finite_is_not_measured(reason: str | None) -> None:
    diagnosis = wb.architecture.diagnose(record_of({"architecture": reason and {"reason": reason}}))
    assert {f.status for f in diagnosis} == {"not_measured"}
    assert all((reason or "no audit of the model") in f.summary for f in diagnosis)
    for name, value in (("skip_rms", 0.0), ("skip_rms", float("nan")), ("sum_rms", float("inf"))):
        record = audit(deep_residual())
        record.facts["architecture"]["joins"][3][name] = json.loads(dumps(value))
        assert statuses(wb.architecture.diagnose(record))["branch_not_zero"] == "not_measured"


def test_the_joins_are_a_table() -> None:
    table = wb.architecture.joins(audit(deep_residual(depth=3, norm="after_add")))
    assert table["module"].tolist() == ["blocks.0", "blocks.1", "blocks.2"]
    assert set(table["placement"]) == {"after_add"}
    assert (table["layers"] == 2).all()
    assert wb.architecture.joins(empty()).columns.tolist() == table.columns.tolist()
    assert len(wb.architecture.depths(empty())) == 0


ALARM = {"stability.early": "fail", "lr.too_high": "warn", "gradients.exploding": "warn", "data.imbalance": "warn"}


@pytest.mark.parametrize(("sign", "status"), [("stability.early", "warn"), ("lr.too_high", "warn"), ("gradients.exploding", "warn"), ("data.imbalance", "ok"), ("", "ok")])  # fmt: skip
def test_a_practice_that_is_missing_is_an_alarm_only_where_training_shows_a_sign(sign: str, status: str) -> None:
    structure = wb.architecture.diagnose(audit(deep_residual(residual=False)))
    assert structure["architecture.no_residual"].status == "warn"
    codes = dict.fromkeys(("stability.early", "stability.divergent", *ALARM), "ok") | (
        {sign: ALARM[sign]} if sign else {}
    )
    told = tuple(Finding(code=code, status=s, summary="planted") for code, s in codes.items())  # type: ignore[arg-type]
    found = excused_architecture(dataclasses.replace(structure, findings=structure.findings + told))
    assert found["architecture.no_residual"].status == status
    untrained = tuple(dataclasses.replace(f, status="not_measured") for f in told)
    kept = excused_architecture(dataclasses.replace(structure, findings=structure.findings + untrained))
    assert kept["architecture.no_residual"].status == "warn"


def test_a_small_embedding_is_no_growth() -> None:
    """Four branches of unit size on an embedding of 0.02: without it they would grow by 4**0.5 / 1."""
    join = {"module": "", "skip": "identity", "placement": "pre", "norm": None, "layers": 3, "last_weight": "w", "zero_parameters": [], "branch_rms": 1.0}  # fmt: skip
    sizes = [(0.02**2 + k) ** 0.5 for k in range(5)]
    joins = [join | {"skip_rms": a, "sum_rms": b} for a, b in itertools.pairwise(sizes)]
    facts = {"weight_layers": 14, "num_joins": 4, "joins": joins, "norms": ["n"], "norm_modules": ["n"]}
    found = wb.architecture.diagnose(record_of({"architecture": facts}))["architecture.branch_not_zero"]
    assert (found.status, found.value) == ("ok", pytest.approx(2.0, rel=0.01))


# Variants over depth, on networks whose largest stable learning rate is arithmetic.

GRID = [0.03, 0.06, 0.12, 0.24, 0.48, 0.96]


class Chain(nn.Module):
    """y = curvature^(1/2) * w x: the loss 1/2 y^2 has this curvature, and gradient descent is stable iff lr * curvature < 2."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.curvature = curvature
        self.w = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return math.sqrt(self.curvature) * (x @ self.w)


def chain(depth: int, steep: float = 1.0) -> Workload:
    data = TensorDataset(torch.ones(2, 1, dtype=torch.float64))
    return Workload(
        name=f"chain_{depth}", build_model=lambda: Chain(steep * depth), train_data=data, validation_data=data,
        loss=half_squared_length, config=TrainConfig(optimizer="sgd", peak_lr=0.1, total_steps=200, batch_size=2),
    )  # fmt: skip


def test_the_largest_stable_lr_is_bracketed_by_the_grid(tmp_path: Path) -> None:
    variants = {"gentle": chain, "far too steep": lambda depth: chain(depth, 1e4)}
    study = wb.architecture.Study(variants=variants, depths=(1, 12), lrs=GRID, steps=100)
    record = study.run(wb.load_workload("digits_mlp"), out=tmp_path / "study")
    table = wb.architecture.depths(record).set_index(["variant", "depth"])
    assert len(table) == 4
    for (variant, depth), row in table.iterrows():
        edge = 2 / (depth * {"gentle": 1, "far too steep": 1e4}[variant])
        stable = [lr for lr in GRID if lr < edge]
        if len(stable) == len(GRID):
            assert (row["stable_lr"], row["censored"]) == (GRID[-1], "above")
        elif not stable:
            assert (row["censored"], row["unstable_lr"]) == ("below", GRID[0])
            assert math.isnan(row["stable_lr"])
        else:
            assert row["stable_lr"] == stable[-1]
            assert row["unstable_lr"] == GRID[len(stable)]
            assert row["censored"] is None


def test_nothing_learned_is_said_and_the_same_call_again_trains_nothing(tmp_path: Path) -> None:
    variants = {
        "gentle": chain,
        "dead": lambda depth: chain(depth).replace(build_model=lambda: Chain(0.0), name="dead"),
    }
    study = wb.architecture.Study(variants=variants, depths=(1,), lrs=GRID[:2], steps=20)
    first = study.run(chain(1), out=tmp_path / "study")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "study" / "variants").rglob("events.jsonl")}
    again = study.run(chain(1), out=tmp_path / "study")
    assert len(files) == 4
    assert files == {path: path.stat().st_mtime_ns for path in files}
    table = wb.architecture.depths(first)
    assert wb.architecture.depths(again).equals(table)
    assert table["censored"].tolist() == ["above", "untrained"]
    assert math.isnan(table["stable_lr"][1])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_what_it_is_called(name: str, tmp_path: Path) -> None:
    """By its own audit: which placement, and whether it begins as the identity (F2.8)."""
    study = wb.architecture.Study(variants={name: VARIANTS[name]}, depths=(2,), lrs=[0.01], steps=12)
    record = study.run(VARIANTS[name](2), out=tmp_path / "study")
    facts = record.facts["architecture"]
    places = {"x + f(x)": "none", "x + Norm(f(x))": "branch", "Norm(x + f(x))": "after_add", "x + f(Norm(x))": "pre"}
    expected = places.get(name.partition(",")[0])
    assert {join["placement"] for join in facts["joins"]} == ({expected} if expected else set())
    assert wb.architecture.depths(record)["identity_at_start"].tolist() == [name.endswith("at first")]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"depths": (2, 0)}, r"depths\[1\]=0 must be an integer of at least 1"),
        ({"lrs": []}, "holds no learning rate"),
        ({"seeds": 0}, "seeds=0"),
        ({"variants": ["plain"]}, "must map names to functions"),
        ({"variants": {"mine": deep_residual()}}, r"variants\['mine'\].*must be a function of the depth"),
    ],
)
def test_fields_out_of_range_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wb.architecture.Study(**fields)


# The picture.


def row(
    variant: str, depth: int, stable: float | None, unstable: float | None = None, censored: str | None = None
) -> Any:
    best = {"best_lr": None, "best_loss": None, "identity_at_start": False}
    return {
        "variant": variant,
        "depth": depth,
        "stable_lr": stable,
        "unstable_lr": unstable,
        "censored": censored,
        **best,
    }


ROWS = [
    row("plain", 2, 0.03, 0.06), row("plain", 6, 0.01, 0.02), row("plain", 24, None, None, "untrained"),
    row("pre", 2, 2.0, None, "above"), row("pre", 6, 0.5, 1.0), row("pre", 24, 0.25, 0.5),
    row("none", 2, 0.06, 0.12), row("none", 6, 0.01, 0.02), row("none", 24, None, 1e-4, "below"),
]  # fmt: skip


def drawn(rows: list[dict[str, Any]]) -> Axes:
    record = empty()
    record.facts = {"architecture_depths": rows}
    return wb.architecture.plot(record, ax=Figure().subplots())


def test_each_variant_is_a_line_with_its_points() -> None:
    lines = {str(line.get_label()): line for line in drawn(ROWS).lines}
    for variant in ("plain", "pre", "none"):
        x, y = (np.asarray(values, dtype=float) for values in lines[variant].get_data())
        wanted = [(r["depth"], r["stable_lr"]) for r in ROWS if r["variant"] == variant]
        assert x == pytest.approx([depth for depth, _ in wanted], rel=0.05)
        np.testing.assert_array_equal(y, np.array([lr for _, lr in wanted], dtype=float))
    styles = {(lines[v].get_color(), lines[v].get_marker(), lines[v].get_linestyle()) for v in ("plain", "pre", "none")}
    assert len(styles) == 3


@pytest.mark.parametrize(("marker", "label", "point"), [("^", "lies above", (2, 2.0)), ("v", "lies below", (24, 1e-4))])
def test_the_ends_of_the_grid_are_marked(marker: str, label: str, point: tuple[float, float]) -> None:
    ax = drawn(ROWS)
    marks = [
        (float(x), float(y))
        for line in ax.lines
        if line.get_marker() == marker and line.get_linestyle() == "None" and line.get_markersize() == 11
        for x, y in zip(*line.get_data(), strict=True)
    ]
    assert marks == [pytest.approx(point, rel=0.05)]
    legend = ax.get_legend()
    assert legend is not None
    assert any(label in text.get_text() for text in legend.get_texts())


def test_where_nothing_is_learned_a_cross_stands_at_the_top_and_nothing_to_draw_is_said() -> None:
    crosses = [line for line in drawn(ROWS).lines if "learns at no lr" in str(line.get_label())]
    assert [list(line.get_xdata()) for line in crosses] == [[24.0]]
    for rows in ([], [row("plain", 2, None, None, "untrained")], [row("plain", 2, float("nan"))]):
        assert why_not_measured(drawn(rows))
    for rows in ([row("plain", 2, 0.5, 1.0)], [row("plain", 2, 1.0, None, "above")], [row("x", 2, None, 0.1, "below")]):
        assert why_not_measured(drawn(rows)) is None, "a single point is enough"
