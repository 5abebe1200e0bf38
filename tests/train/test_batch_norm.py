"""Batch norm with a set number of statistic examples: exactly so many, for any batch, and torch's own where it has no more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.lane_models import MODELS, lane_workload
from tests.helpers.workloads import small_workload
from workbench.record.write import StudyWriter
from workbench.train.checkpoint import load_checkpoint
from workbench.train.trainer import Trainer
from workbench.workloads.batch_norm import GhostBatchNorm, batch_norm_layers, ghost_batch_norm, replace_batch_norm

KINDS: dict[int, tuple[type[nn.Module], tuple[int, ...]]] = {
    1: (nn.BatchNorm1d, ()),
    2: (nn.BatchNorm1d, (3,)),
    3: (nn.BatchNorm2d, (2, 3)),
    4: (nn.BatchNorm3d, (2, 1, 2)),
}


def ghost(channels: int, stat_examples: int, *, kind: int = 1, **settings: Any) -> GhostBatchNorm:
    layer = ghost_batch_norm(KINDS[kind][0](channels, **settings), stat_examples)
    assert isinstance(layer, GhostBatchNorm)
    return layer


def drawn(layer: nn.Module, examples: int, space: tuple[int, ...] = ()) -> Tensor:
    """Which examples a statistic is made of: example i is 1 in channel i alone, so the mean tells."""
    layer.momentum = 1.0
    x = torch.eye(examples, dtype=torch.float64).view(examples, examples, *(1 for _ in space))
    layer.double().train()(x.expand(examples, examples, *space))
    assert isinstance(layer.running_mean, Tensor)
    return layer.running_mean > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("examples", "asked"), [(100, 64), (65, 64), (64, 64), (40, 64), (7, 3)])
def test_exactly_so_many_examples_make_a_statistic(kind: int, examples: int, asked: int) -> None:
    inside = drawn(ghost(examples, asked, kind=kind), examples, KINDS[kind][1])
    assert int(inside.sum()) == min(examples, asked)


@pytest.mark.parametrize("kind", KINDS)
def test_all_examples_are_normalised_by_the_statistics_of_the_drawn_ones(kind: int) -> None:
    examples, asked = 9, 4
    torch.manual_seed(5)
    space = KINDS[kind][1]
    x = 3 + 2 * torch.randn(examples, 4, *space, dtype=torch.float64)
    layer = ghost(4, asked, kind=kind, momentum=0.3).double()
    nn.init.uniform_(layer.weight)
    nn.init.uniform_(layer.bias)
    twin = copy.deepcopy(layer)
    torch.manual_seed(1)
    out = layer(x).detach().numpy()
    torch.manual_seed(1)
    chosen = x[torch.rand(examples).argsort()[:asked]].numpy()
    axes = (0, *range(2, x.dim()))
    shape = (1, 4, *(1 for _ in space))
    mean, var = chosen.mean(axes), chosen.var(axes)
    weight, bias = (p.detach().numpy().reshape(shape) for p in (layer.weight, layer.bias))
    expected = (x.numpy() - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + layer.eps) * weight + bias
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(layer.running_mean, 0.3 * mean, rtol=1e-12)
    np.testing.assert_allclose(layer.running_var, 0.7 + 0.3 * chosen.var(axes, ddof=1), rtol=1e-12)
    assert int(layer.num_batches_tracked) == 1

    def again(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        out: Tensor = twin(x)
        return out

    assert torch.autograd.gradcheck(again, x.requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_that_is_not_larger_is_bitwise_torch(kind: int, momentum: float | None) -> None:
    torch.manual_seed(3)
    plain = KINDS[kind][0](4, momentum=momentum)
    ours = ghost_batch_norm(copy.deepcopy(plain), 8)
    state = torch.get_rng_state()
    for examples in (8, 5):
        x = torch.randn(examples, 4, *KINDS[kind][1], generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = x.detach().clone().requires_grad_()
        expected, found = plain(x), ours(y)
        (expected**3).sum().backward()
        (found**3).sum().backward()
        assert torch.equal(expected, found)
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("examples", [1, 3, 100])
def test_evaluation_takes_the_running_statistics_for_any_batch_and_draws_nothing(examples: int) -> None:
    layer = ghost(3, 8)
    layer(torch.randn(50, 3))
    layer.eval()
    state, before = torch.get_rng_state(), {n: t.clone() for n, t in layer.state_dict().items()}
    x = torch.randn(examples, 3, generator=torch.Generator().manual_seed(1))
    expected = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps)
    assert torch.equal(layer(x), expected)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], t) for n, t in layer.state_dict().items())


def test_bfloat16_in_gives_bfloat16_out_with_statistics_of_more_digits() -> None:
    layer, x = ghost(3, 8), 100 + torch.randn(32, 3).bfloat16()
    torch.manual_seed(0)
    out = layer(x)
    torch.manual_seed(0)
    sample = x[torch.rand(32).argsort()[:8]].float()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * sample.var(0))


def test_a_model_is_converted_with_its_parameters_hooks_and_shared_layers() -> None:
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared, nn.Sequential(nn.BatchNorm1d(4, eps=1e-3).eval()))
    seen: list[int] = []
    shared.register_forward_hook(lambda *_: seen.append(1))
    parameters, before = list(model.parameters()), {n: t.clone() for n, t in model.state_dict().items()}
    assert ghost_batch_norm(model, 3) is model
    layers = batch_norm_layers(model)
    assert list(layers) == ["0", "3.0"]
    assert all(isinstance(layer, GhostBatchNorm) and layer.stat_examples == 3 for layer in layers.values())
    assert model[0] is model[2]
    assert layers["3.0"].eps == 1e-3
    assert not layers["3.0"].training
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    model(torch.randn(6, 4))
    assert seen == [1, 1]
    plain = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)))
    plain.load_state_dict(before | {f"2.{n}": t for n, t in shared.state_dict().items()})
    ghost_batch_norm(model, 5)
    assert {layer.stat_examples for layer in batch_norm_layers(model).values()} == {5}
    assert "stat_examples=5" in repr(model)


class OwnForward(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return input


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda: ghost_batch_norm(nn.Linear(2, 2), 64), "Linear has no batch norm layer"),
        (lambda: ghost_batch_norm(nn.Sequential(OwnForward(2)), 64), "OwnForward has a forward of its own"),
        (lambda: ghost_batch_norm(nn.BatchNorm1d(2), 0), "stat_examples=0 must be"),
        (lambda: ghost(2, 3, kind=3)(torch.zeros(5, 2)), "expected 4D input"),
        (lambda: ghost(2, 1)(torch.zeros(5, 2)), "Expected more than 1 value per channel"),
        (lambda: replace_batch_norm(nn.BatchNorm1d(2), "layr"), "norm='layr' is not known.*layer"),
        (lambda: replace_batch_norm(nn.BatchNorm1d(2), "group", channels_per_group=0), "channels_per_group=0"),
        (lambda: replace_batch_norm(nn.BatchNorm1d(2), "group", max_groups=True), "max_groups=True"),
        (lambda: replace_batch_norm(nn.Sequential(OwnForward(2)), "layer"), "OwnForward has a forward of its own"),
    ],
)
def test_what_cannot_be_converted_says_so(convert: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert()


# Layer norm and group norm in its place (P6.1)


@pytest.mark.parametrize(("layer", "shape"), [(nn.BatchNorm1d, (5, 6)), (nn.BatchNorm1d, (5, 6, 3)), (nn.BatchNorm2d, (5, 6, 3, 2)), (nn.BatchNorm3d, (5, 6, 2, 2, 2))])  # fmt: skip
def test_layer_norm_is_that_of_torch_over_each_example(layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    x = 3 + torch.randn(*shape)
    found = replace_batch_norm(layer(6), "layer")(x)
    torch.testing.assert_close(found, nn.LayerNorm(shape[1:])(x))
    torch.testing.assert_close(replace_batch_norm(layer(6), "layer")(x[:1]), found[:1])


@pytest.mark.parametrize(
    ("channels", "limits", "groups"),
    [
        *(
            (c, {}, g)
            for c, g in {256: 32, 48: 12, 40: 10, 34: 2, 32: 8, 24: 6, 15: 3, 8: 2, 17: 1, 7: 1, 4: 1}.items()
        ),
        *((64, limits, g) for limits, g in (({"max_groups": 7}, 4), ({"channels_per_group": 16}, 4))),
        (64, {"max_groups": 64, "channels_per_group": 1}, 64),
    ],
)
def test_groups_are_as_many_as_divide_the_channels_and_leave_enough_in_each(
    channels: int, limits: dict[str, int], groups: int
) -> None:
    norm = replace_batch_norm(nn.BatchNorm2d(channels), "group", **limits)
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == groups


# In the trainer.


def test_lanes_train_as_they_do_alone_by_either_way(tmp_path: Path) -> None:
    workload = lane_workload(MODELS["conv"])
    base = workload.config.replace(total_steps=6, bn_stat_examples=3, eval_every_steps=3)
    assert base.batch_size > 3
    configs = [base.replace(shared_seed=seed, peak_lr=lr) for seed, lr in ((0, 0.05), (1, 0.05), (0, 0.1))]
    found: dict[str, list[Any]] = {}
    for way in ("loop", "vmap"):
        study = StudyWriter.open(tmp_path / way, kind="trial", workload=workload.name, config=base.to_dict())
        records = Trainer(gradients=way).run_trials(workload, configs, study, stage="trial")
        found[way] = [r.steps["loss"].to_numpy() for r in records]
        found[f"{way} evals"] = [r.evals["value"].to_numpy() for r in records]
        study.close()
    alone = [
        Trainer(gradients="loop").run(workload, c, out=tmp_path / f"{i}").steps["loss"] for i, c in enumerate(configs)
    ]
    for one, loop, vmap in zip(alone, found["loop"], found["vmap"], strict=True):
        np.testing.assert_array_equal(one, loop)
        np.testing.assert_allclose(vmap, loop, rtol=1e-4)
    for loop, vmap in zip(found["loop evals"], found["vmap evals"], strict=True):
        np.testing.assert_allclose(vmap, loop, rtol=1e-3, atol=1e-5)
    plain = Trainer(gradients="loop").run(workload, base.replace(bn_stat_examples=None), out=tmp_path / "plain")
    assert not np.allclose(plain.steps["loss"], alone[0], rtol=1e-3)


@pytest.mark.parametrize("way", ["loop", "vmap"])
@pytest.mark.parametrize("stat_examples", [None, 5])
def test_running_statistics_are_as_warm_whatever_a_batch_is_cut_into(
    way: Any, stat_examples: int | None, tmp_path: Path
) -> None:
    """A feature that is always 2 has a running mean of 2 (1 - 0.9^n) and a variance of 0.9^n after n updates."""
    steps = 5
    given = small_workload(build_model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    data: Any = given.train_data
    data.tensors[0][:, 0] = 2.0
    seen = {}
    for pieces in (1, 4):
        config = given.config.replace(batch_size=48, total_steps=steps, eval_every_steps=steps, checkpoint_every_steps=steps, accumulate_steps=pieces, bn_stat_examples=stat_examples)  # fmt: skip
        Trainer(gradients=way).run(given, config, out=tmp_path / str(pieces))
        seen[pieces] = load_checkpoint(tmp_path / str(pieces) / "trials/0/checkpoints/step-00000005").model
        cold = 0.9**steps
        assert float(seen[pieces]["0.running_mean"][0]) == pytest.approx(2 * (1 - cold), rel=1e-6)
        assert float(seen[pieces]["0.running_var"][0]) == pytest.approx(cold, rel=1e-6)
        assert int(seen[pieces]["0.num_batches_tracked"]) == pieces * steps
    if stat_examples is None:
        variances = [seen[pieces]["0.running_var"][1:] for pieces in (1, 4)]
        torch.testing.assert_close(variances[1], variances[0], rtol=0.05, atol=0)
