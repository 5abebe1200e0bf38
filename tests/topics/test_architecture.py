"""Architecture: residual joins of models that are known by construction, what an audit leaves as it was, verdicts, variants over depth, and their picture."""

from __future__ import annotations

import contextlib
import dataclasses
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
from torch import Tensor, nn, softmax
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.records import MemoryRecord, empty
from tests.helpers.workloads import Having, small_workload
from workbench.config import TrainConfig
from workbench.errors import ConfigError, WorkloadError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.plots.style import why_not_measured
from workbench.record.json_values import dumps
from workbench.topics.architecture.dataflow import trace_dataflow
from workbench.topics.architecture.diagnose import CODES, excused_architecture
from workbench.topics.architecture.joins import Join, find_joins
from workbench.topics.architecture.study import collect_architecture
from workbench.workloads.analytic import half_squared_length
from workbench.workloads.base import Workload
from workbench.workloads.sklearn_data import deep_residual

CPU = torch.device("cpu")


# Joins.


def joins_of(model: nn.Module, *inputs: Tensor) -> list[Join]:
    torch.manual_seed(0)
    return find_joins(trace_dataflow(model, lambda: model(*inputs), inputs))


def two_layers(function: Callable[..., Any], **more: nn.Module | nn.Parameter) -> Having:
    return Having(function, one=nn.Linear(8, 8), two=nn.Linear(8, 8), **more)


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
        lambda m, x: x - branch(m, x),
        lambda m, x: torch.addcmul(x, branch(m, x), torch.full((8,), 0.1)),
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


def test_a_linear_layer_beside_a_branch_is_a_projection() -> None:
    model = two_layers(lambda m, x: m.norm(branch(m, x)) + m.skip(x), skip=nn.Linear(8, 8), norm=nn.LayerNorm(8))
    (join,) = joins_of(model, X)
    assert (join.skip, join.placement, join.norm, join.layers) == ("projection", "branch", "norm", 2)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), X),
        (two_layers(lambda m, x: m.two(torch.cat([x[:, :4], m.one(x)[:, :4]], 1))), X),  # as in DenseNet
        (two_layers(lambda m, x: m.one(x) + m.two(x)), X),  # two towers
        (two_layers(lambda m, x: m.one(x) * x), X),
        (two_layers(lambda m, x: 0.5 * x * (1 + torch.tanh(x + 0.044 * x**3))), X),  # an activation written out
        (two_layers(lambda m, x: ((x - branch(m, x)) ** 2).mean(-1)), X),  # the error of a reconstruction
        (nn.LSTM(8, 8, num_layers=2), SEQUENCE),
        (nn.MultiheadAttention(8, 2), None),
    ],
)  # fmt: skip
def test_what_is_no_residual_connection(model: nn.Module, x: Tensor | None) -> None:
    assert joins_of(model, *([SEQUENCE] * 3 if x is None else [x])) == []


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_layer_of_torch(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    joins = joins_of(model.train(norm_first), SEQUENCE)
    assert {(j.placement, j.layers) for j in joins} == {("pre" if norm_first else "after_add", 2)}
    assert [j.norm for j in joins] == [f"layers.{k}.norm{i}" for k in range(2) for i in (1, 2)]
    assert [j.last_weight for j in joins[:2]] == ["layers.0.self_attn.out_proj.weight", "layers.0.linear2.weight"]


def layer_norm_by_hand(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()


NORMS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
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


# The traced forward pass, and the audit.


ALPHA = {"alpha": nn.Parameter(torch.zeros(()))}


@pytest.mark.parametrize(
    ("end", "parts", "zeros"),
    [
        (lambda m, f: m.alpha * f, ALPHA, ("alpha",)), (lambda m, f: m.norm(f), {}, ("two.weight",)),
        (lambda m, f: m.norm(f), {}, ("norm.weight",)), (lambda m, f: m.norm(f), {}, ()),  # biases of zero make none
    ],
)  # fmt: skip
def test_what_ends_a_branch_with_zero_is_named(end: Any, parts: Any, zeros: tuple[str, ...]) -> None:
    model = two_layers(lambda m, x: x + end(m, branch(m, x)), norm=nn.LayerNorm(8), **parts)
    for name, p in model.named_parameters():
        if name in zeros or name.endswith("bias"):
            nn.init.zeros_(p)
    (join,) = joins_of(model, X)
    assert (join.branch_rms == 0, join.zero_parameters) == (bool(zeros), zeros)


class Restless(nn.Module):
    """Batch norm, dropout, draws of three generators, a buffer that is replaced, one that is written into."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)  # fmt: skip
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


def facts_of(build_model: Callable[[], nn.Module]) -> dict[str, Any]:
    workload = small_workload(build_model=build_model)
    return collect_architecture(workload, workload.config, CPU)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_everything_is_left_as_it_was(error: type[BaseException] | None) -> None:
    model, x = Restless(error), torch.randn(4, 6)

    def state() -> list[Any]:
        tensors = [(name, id(t), t.detach().numpy().tobytes()) for name, t in (*model.named_parameters(), *model.named_buffers())]  # fmt: skip
        hooks = (len(module_hooks._global_forward_hooks), len(module_hooks._global_forward_pre_hooks))
        random_ = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tobytes())
        return [tensors, hooks, random_, torch.backends.mha.get_fastpath_enabled()]

    before = state()
    with contextlib.nullcontext() if error is None else pytest.raises(error, match="stop here"):
        trace_dataflow(model, lambda: model(x), x)
    assert state() == before


@pytest.mark.parametrize("attends", [True, False])
def test_operations_that_may_attend_are_counted_whatever_they_are_called(attends: bool) -> None:
    function = lambda m, x: m.head(softmax(x @ x.T, -1) @ x if attends else x)  # noqa: E731
    assert facts_of(lambda: Having(function, head=nn.Linear(3, 1)))["softmaxes"] == attends


def dropped(zero: bool) -> nn.Module:
    """A branch that is dropped as a whole in training, by chance."""
    scale = nn.Parameter(torch.zeros(()) if zero else torch.ones(()))
    function = lambda m, x: m.head(x + (0.0 if m.training else 1.0) * m.scale * m.one(x))  # noqa: E731
    return Having(function, one=nn.Linear(3, 3), head=nn.Linear(3, 1), scale=scale)


@pytest.mark.parametrize("zero", [True, False])
def test_a_branch_that_was_dropped_by_chance_does_not_begin_at_zero(zero: bool) -> None:
    (join,) = facts_of(lambda: dropped(zero))["joins"]
    assert (join["branch_rms"] == 0, join["zero_parameters"]) == (zero, ("scale",) if zero else ())


def test_what_cannot_be_traced_says_why() -> None:
    def raises(model: Any, x: Tensor) -> None:
        torch.rand(1)
        raise RuntimeError("cannot be told\nin one line")

    def model(call: Any) -> Callable[[], nn.Module]:
        return lambda: Having(call, one=nn.Linear(3, 4), norm=nn.LayerNorm(4))

    before = torch.get_rng_state()
    assert facts_of(model(raises))["reason"] == "the forward pass cannot be traced (RuntimeError: cannot be told)"
    past = facts_of(model(lambda m, x: m.one(torch.from_numpy(x.numpy().copy()))))
    assert "by a way that is no operation on them" in past["reason"]
    idle = facts_of(model(lambda m, x: m.one(x)))
    assert (idle["norm_modules"], idle["norms"]) == (["norm"], [])
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(WorkloadError, match="division by zero"):
        facts_of(lambda: 1 / 0)  # type: ignore[arg-type,return-value]


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


@pytest.mark.parametrize("name", ["digits_resnet", "breast_cancer", "quadratic"])
def test_healthy_and_shallow_models_get_no_warning(name: str) -> None:
    assert statuses(wb.architecture.diagnose(audit(wb.load_workload(name)))) == {}


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"residual": False}, {"no_residual", "no_norm"}), ({}, {"no_norm", "branch_not_zero"}), ({"norm": "branch"}, set()),
        ({"norm": "after_add"}, {"norm_after_add"}), ({"zero_init": True}, set()), ({"norm": "branch", "depth": 24}, {"branch_not_zero"}),
        ({"depth": 2}, set()), ({"depth": 2, "norm": "after_add"}, set()),
    ],
)  # fmt: skip
def test_each_practice_that_a_deep_network_lacks_is_named(options: dict[str, Any], warned: set[str]) -> None:
    record = audit(deep_residual(**options))
    assert statuses(wb.architecture.diagnose(record)) == dict.fromkeys(warned, "warn")
    assert set(wb.architecture.joins(record)["layers"]) <= {2}


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
    for name, value in (("skip_rms", 0.0), ("sum_rms", float("inf"))):
        record = audit(deep_residual())
        record.facts["architecture"]["joins"][3][name] = json.loads(dumps(value))
        assert statuses(wb.architecture.diagnose(record))["branch_not_zero"] == "not_measured"


@pytest.mark.parametrize(("sign", "status"), [("stability.early", "warn"), ("gradients.exploding", "warn"), ("evaluation.underfits", "warn"), ("data.imbalance", "ok"), ("", "ok")])  # fmt: skip
def test_a_practice_that_is_missing_is_an_alarm_only_where_training_shows_a_sign(sign: str, status: str) -> None:
    structure = wb.architecture.diagnose(audit(deep_residual(residual=False)))
    assert structure["architecture.no_residual"].status == "warn"
    codes = dict.fromkeys(("stability.early", "stability.divergent"), "ok") | ({sign: "warn"} if sign else {})
    told = tuple(Finding(code=code, status=s, summary="planted") for code, s in codes.items())  # type: ignore[arg-type]
    found = excused_architecture(dataclasses.replace(structure, findings=structure.findings + told))
    assert found["architecture.no_residual"].status == status
    untrained = tuple(dataclasses.replace(f, status="not_measured") for f in told)
    kept = excused_architecture(dataclasses.replace(structure, findings=structure.findings + untrained))
    assert kept["architecture.no_residual"].status == "warn"


# Variants over depth, on networks whose largest stable learning rate is arithmetic.

GRID = [0.03, 0.06, 0.12, 0.24, 0.48, 0.96]


def chain(depth: int, steep: float = 1.0) -> Workload:
    """y = curvature^(1/2) * w x: the loss 1/2 y^2 has this curvature, and gradient descent is stable iff lr * curvature < 2."""
    data, slope = TensorDataset(torch.ones(2, 1, dtype=torch.float64)), math.sqrt(steep * depth)

    def build() -> nn.Module:
        return Having(lambda m, x: slope * (x @ m.w), w=nn.Parameter(torch.ones(1, 1, dtype=torch.float64)))

    return Workload(
        name=f"chain_{depth}", build_model=build, train_data=data, validation_data=data,
        loss=half_squared_length, config=TrainConfig(optimizer="sgd", peak_lr=0.1, total_steps=200, batch_size=2),
    )  # fmt: skip


def test_the_largest_stable_lr_is_bracketed_by_the_grid_and_trained_once(tmp_path: Path) -> None:
    steep = {"gentle": 1.0, "far too steep": 1e4, "dead": 0.0}
    variants = {name: lambda depth, s=s: chain(depth, s) for name, s in steep.items()}
    study = wb.architecture.Study(variants=variants, depths=(1, 12), lrs=GRID, steps=100)
    record = study.run(chain(1), out=tmp_path / "study")
    table = wb.architecture.depths(record).set_index(["variant", "depth"])
    assert len(table) == 6
    for (variant, depth), row in table.iterrows():
        edge = 2 / (depth * steep[variant]) if steep[variant] else math.nan
        stable = [lr for lr in GRID if lr < edge]
        highest, lowest = (stable or [math.nan])[-1], [lr for lr in GRID if lr > edge][:1] or [math.nan]
        censored = "untrained" if variant == "dead" else {0: "below", len(GRID): "above"}.get(len(stable))
        assert row["censored"] == censored
        np.testing.assert_equal([row["stable_lr"], row["unstable_lr"]], [highest, *lowest])
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "study" / "variants").rglob("events.jsonl")}
    assert wb.architecture.depths(study.run(chain(1), out=tmp_path / "study")).equals(wb.architecture.depths(record))
    assert len(files) == 6 * len(GRID)
    assert files == {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"depths": (2, 0)}, r"depths\[1\]=0 must be an integer of at least 1"),
        ({"variants": ["plain"]}, "must map names to functions"),
        ({"variants": {"mine": deep_residual()}}, r"variants\['mine'\].*must be a function of the depth"),
    ],
)
def test_fields_out_of_range_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wb.architecture.Study(**fields)


# The picture.


def row(*values: Any) -> dict[str, Any]:
    names = ("variant", "depth", "stable_lr", "unstable_lr", "censored")
    return dict(zip(names, (*values, *[None] * (5 - len(values))), strict=True))


ROWS = [
    row("plain", 2, 0.03, 0.06), row("plain", 6, 0.01, 0.02), row("plain", 24, None, None, "untrained"),
    row("pre", 2, 2.0, None, "above"), row("pre", 6, 0.5, 1.0), row("pre", 24, 0.25, 0.5),
    row("none", 2, 0.06, 0.12), row("none", 6, 0.01, 0.02), row("none", 24, None, 1e-4, "below"),
]  # fmt: skip


def drawn(rows: list[dict[str, Any]]) -> Axes:
    record = empty()
    record.facts = {"architecture_depths": rows}
    return wb.architecture.plot(record, ax=Figure().subplots())


@pytest.mark.parametrize(("marker", "label", "point"), [("^", "lies above", (2, 2.0)), ("v", "lies below", (24, 1e-4))])
def test_lines_and_the_ends_of_the_grid(marker: str, label: str, point: tuple[float, float]) -> None:
    ax = drawn(ROWS)
    assert why_not_measured(drawn(ROWS[2:3]))
    assert why_not_measured(drawn(ROWS[:1])) is None, "a single point is enough"
    lines = {str(line.get_label()): line for line in ax.lines}
    wanted = np.array([r["stable_lr"] for r in ROWS if r["variant"] == "pre"], dtype=float)
    np.testing.assert_array_equal(np.asarray(lines["pre"].get_data()[1], dtype=float), wanted)
    marks = [line for line in ax.lines if (line.get_marker(), line.get_markersize()) == (marker, 11)]
    assert [tuple(np.ravel(line.get_data())) for line in marks if len(line.get_data()[0])] == [
        pytest.approx(point, rel=0.05)
    ]
    legend = ax.get_legend()
    assert legend is not None
    assert any(label in text.get_text() for text in legend.get_texts())


def test_sensitivity_is_the_mean_excess_loss_and_a_lost_run_counts_as_untrained() -> None:
    """Losses 1, 1.5, 9 and none, the untrained model's 3: excesses 0, 0.5, 2 and 2."""
    record = empty()
    losses = [[0.1, 1.0], [0.2, 1.5], [0.4, 9.0], [0.8, None]]
    level = [[lr, 2.0] for lr, _ in losses]
    swept = [row("mine", 2) | {"initial_loss": 3.0, "losses": each} for each in (losses, level, [])]
    record.facts = {"architecture_depths": [swept[0], swept[1] | {"variant": "level"}, swept[2] | {"variant": "none"}]}
    table = wb.architecture.lr_sensitivity(record)
    assert table["loss"].tolist() == [1.0, 1.5, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    assert table["sensitivity"].tolist() == [1.125] * 4 + [0.0] * 4
    labels = [line.get_label() for line in wb.architecture.plot_sensitivity(record, ax=Figure().subplots()).lines]
    assert labels == ["mine, 2: 1.125", "level, 2: 0.000"]
    assert why_not_measured(wb.architecture.plot_sensitivity(empty(), ax=Figure().subplots()))
