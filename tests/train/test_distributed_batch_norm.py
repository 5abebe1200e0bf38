"""Synchronised batch norm on real gloo processes against the whole batch in one; merged statistics against those of the examples themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.helpers.batch_norm_processes import EQUAL, KINDS, SIZES, data, run_processes, small_net, trained, whole_batch
from workbench.errors import ConfigError, UsageError
from workbench.train.distributed.batch_norm import SynchronisedBatchNorm
from workbench.train.lanes.recorder import CannotBatch, Recorder
from workbench.workloads.batch_norm import ghost_batch_norm

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(request.param, tmp_path_factory.mktemp("ranks"))


def test_forward_and_backward_are_those_of_the_whole_batch(ranks: list[dict[str, Any]]) -> None:
    compared = 0
    for kind in KINDS:
        for sizes in SIZES[len(ranks)]:
            layer, x, y = whole_batch(kind, sum(sizes))
            x.requires_grad_()
            out = layer(x)
            (out**2 * y).sum().backward()
            seen = [rank["layers"][kind, sizes] for rank in ranks]
            assert [len(one["out"]) for one in seen] == list(sizes)
            torch.testing.assert_close(torch.cat([one["out"] for one in seen]), out.detach(), **EXACT)
            torch.testing.assert_close(torch.cat([one["x.grad"] for one in seen]), x.grad, **EXACT)
            for name, p in layer.named_parameters():
                torch.testing.assert_close(sum(one[f"{name}.grad"] for one in seen), p.grad, **EXACT)
            for one in seen:
                for name, value in layer.state_dict().items():
                    torch.testing.assert_close(one[name], value, **EXACT)
                torch.testing.assert_close(one["eval"], layer.eval()(x[:1]).detach(), **EXACT)
            compared += 1
    assert compared == 6


def test_a_set_number_of_statistic_examples_is_that_of_all_processes(ranks: list[dict[str, Any]]) -> None:
    assert all(int(rank["drawn"].sum()) == 10 for rank in ranks)
    shares = ranks[0]["drawn"].view(len(ranks), 8).sum(1).tolist()
    assert max(shares) - min(shares) <= 1


def test_within_data_parallel_it_trains_as_one_process_on_all_examples(ranks: list[dict[str, Any]]) -> None:
    expected = trained(small_net(), *data()).state_dict()
    for rank in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(rank["synchronised"][name], value, **EXACT)
    assert not torch.allclose(ranks[0]["copied"]["1.running_mean"], expected["1.running_mean"], rtol=1e-3)
    assert np.ptp(ranks[0]["apart"]["1"].mean, axis=0).min() > 1e-3, (
        "data parallel leaves the processes with statistics of their own"
    )


SEEN = {"copied": "warn", "local": "warn", "merged": "ok", "synchronised": "ok", "frozen": "ok"}
"""How a job trains and writes -> rank_local and first_device_ema."""


@pytest.mark.parametrize("job", SEEN)
def test_the_copying_of_the_first_process_is_found_and_nothing_in_a_healthy_job(
    job: str, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        found = rank["verdicts"][job]
        assert (found["rank_local"], found["first_device_ema"]) == (SEEN[job], SEEN[job])


def test_running_statistics_are_merged_by_the_law_of_total_variance(ranks: list[dict[str, Any]]) -> None:
    means = np.array([2.0 * rank - 3 for rank in range(len(ranks))])
    for rank in ranks:
        np.testing.assert_array_equal(rank["before"][""].mean[:, 0], means)
        assert rank["merged"]["running_mean"].tolist() == [means.mean(), 1.0]
        assert rank["merged"]["running_var"].tolist() == [1 + means.var(), 1.0]
        weights = np.arange(len(ranks)) / np.arange(len(ranks)).sum()
        mean = float(weights @ means)
        assert rank["weighted"]["running_mean"][0].item() == pytest.approx(mean, rel=1e-6)
        assert rank["weighted"]["running_var"][0].item() == pytest.approx(1 + weights @ (means - mean) ** 2, rel=1e-6)
        assert torch.equal(rank["equal"]["running_mean"], EQUAL)
    if len(ranks) == 4:
        assert ranks[0]["merged"]["running_var"][0] == 6.0


def test_a_block_gives_each_process_its_own_statistics_back_and_models_that_differ_are_refused(
    ranks: list[dict[str, Any]],
) -> None:
    for number, rank in enumerate(ranks):
        assert torch.equal(rank["inside"]["running_var"], rank["merged"]["running_var"])
        assert rank["after"]["running_mean"][0] == 2 * number - 3
        assert rank["after"]["running_var"][0] == 1
        assert "every process must have the same model" in rank["refused"]


# One process by itself.


def test_alone_it_is_batch_norm_and_its_state_fits_torch() -> None:
    for kind in KINDS:
        layer, x, _ = whole_batch(kind, 7)
        expected = layer(x)
        ours, x, _ = whole_batch(kind, 7)
        ours = wb.batch_norm.synchronise(ours)
        torch.testing.assert_close(ours(x), expected, **EXACT)
        for name, value in layer.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, **EXACT)
        layer.load_state_dict(ours.state_dict())
        assert torch.equal(layer.eval()(x), ours.eval()(x))


def test_a_model_is_converted_in_one_line() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(ghost_batch_norm(nn.BatchNorm2d(2), 5)))
    parameters, names = list(model.parameters()), list(model.state_dict())
    model = wb.batch_norm.synchronise(model)  # type: ignore[assignment]
    layers = [module for module in model.modules() if isinstance(module, SynchronisedBatchNorm)]
    assert [layer.stat_examples for layer in layers] == [None, 5]
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    again = wb.batch_norm.synchronise(model)
    assert [m.stat_examples for m in again.modules() if isinstance(m, SynchronisedBatchNorm)] == [None, 5]
    plain = nn.Linear(2, 2)
    assert wb.batch_norm.synchronise(plain) is plain


def test_what_cannot_be_synchronised_or_merged_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithActivation(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.relu(super().forward(input))

    layer = wb.batch_norm.synchronise(nn.BatchNorm1d(2))
    for call, error, message in (
        (lambda: wb.batch_norm.merge_running_statistics(nn.BatchNorm1d(2), examples=-1), UsageError, "examples=-1 must be finite"),
        (lambda: layer(torch.zeros(1, 2)), ValueError, "Expected more than 1 value per channel"),
        (lambda: layer(torch.zeros(4, 3)), ValueError, r"expected an input of shape \(examples, 2"),
        (lambda: wb.batch_norm.synchronise(WithActivation(2)), ConfigError, "WithActivation has a forward of its own"),
        (lambda: wb.batch_norm.synchronise(nn.LazyBatchNorm1d()), ConfigError, "does not know its channels yet"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    monkeypatch.setenv("WORLD_SIZE", "4")
    for call in (lambda: layer(torch.randn(4, 2)), lambda: wb.batch_norm.merge_running_statistics(nn.BatchNorm1d(2))):
        with pytest.raises(UsageError, match="WORLD_SIZE=4, but the process group is not initialised"):
            call()


def test_an_exchange_is_never_part_of_a_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = wb.batch_norm.synchronise(nn.BatchNorm1d(2)), torch.randn(4, 2)
    monkeypatch.setattr("workbench.train.distributed.batch_norm.place", lambda _: (0, 2))
    recorder = Recorder()
    with recorder.recording():
        recorder.placeholder("x", x)
        with pytest.raises(CannotBatch, match="reads the value"):
            layer(x)


# Merged statistics.


@pytest.mark.parametrize("sizes", [(5, 5), (1, 9, 4), (7,), (0, 3, 4)])
def test_groups_of_any_size_give_the_statistics_of_all_their_examples(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    groups = [rng.normal(3 * i, 1 + i, size=(n, 4)) for i, n in enumerate(sizes)]
    means, variances = (
        np.array([f(g, axis=0) if len(g) else np.full(4, np.nan) for g in groups]) for f in (np.mean, np.var)
    )
    found, whole = wb.batch_norm.merge_statistics(means, variances, sizes), np.concatenate(groups)
    np.testing.assert_allclose(found.mean, whole.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.variance, whole.var(0), rtol=1e-12)
    np.testing.assert_allclose(found.average_variance + found.spread, found.variance, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "at least one group"),
        (([1.0, 2.0], [1.0]), r"means \(2,\), variances \(1,\)"),
        ((1.0, 1.0), "at least one group"),
        (([1.0], [1.0], [1, 2]), r"counts \(2,\)"),
        (([1.0, 2.0], [1.0, 1.0], [0, 0]), "not all 0"),
        (([1.0, 2.0], [1.0, 1.0], [-1, 2]), "at least 0"),
    ],
)
def test_shapes_and_counts_are_checked(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wb.batch_norm.merge_statistics(*arguments)  # type: ignore[arg-type]
