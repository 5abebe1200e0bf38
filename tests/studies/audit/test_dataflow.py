"""A traced forward pass sees what ran, and leaves everything as it was, also when it is interrupted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from workbench.topics.architecture.dataflow import trace_dataflow


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


def test_the_model_computes_what_it_computes_untraced() -> None:
    model, x, seen = Restless(), torch.randn(4, 6), []
    for traced in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        if traced:
            trace_dataflow(model, lambda: seen.append(model(x)), x)
        else:
            seen.append(model(x))
    assert torch.equal(*seen)


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


def test_data_is_what_depends_on_the_batch() -> None:
    model, x = nn.Linear(6, 6), torch.randn(4, 6)
    noise = torch.ones(6)

    def call() -> Tensor:
        return model(x) * noise + torch.randn_like(x) + (model.weight * 2).sum()

    kinds = {node.op: node.kind for node in trace_dataflow(model, call, {"x": [x]}).nodes if node.op}
    assert (kinds["addmm"], kinds["sum"], kinds["randn_like"], kinds["add"]) == (
        "data",
        "parameter",
        "constant",
        "data",
    )


def test_whole_numbers_lead_nowhere() -> None:
    """A mask made of the tokens is no way for the tokens themselves."""
    model, tokens = nn.Embedding(5, 3), torch.arange(5)
    flow = trace_dataflow(model, lambda: model(tokens) * (tokens > 2).float()[:, None], tokens)
    assert all(flow.nodes[i].floating for node in flow.nodes for i in node.inputs)
    (embedding,) = [at for at, node in enumerate(flow.nodes) if node.op == "embedding"]
    assert flow.nodes[embedding].kind == "data"
    assert flow.data(embedding) == []


def test_what_is_written_into_a_view_is_written_into_all_of_it() -> None:
    x, model = torch.randn(4, 6), nn.Linear(6, 3)

    def call() -> Tensor:
        h = x.clone()
        h[:, :3] += model(x)
        return h.exp()

    flow = trace_dataflow(model, call, x)
    (last,) = [at for at, node in enumerate(flow.nodes) if node.op == "exp"]
    behind, todo = set(), [last]
    while todo:
        for i in flow.data(todo.pop()):
            behind.add(flow.nodes[i].op)
            todo.append(i)
    assert {"addmm", "clone", "add"} <= behind
