"""Models and loaders as people have them: nothing is wrong with these, and their sick twins are found."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from workbench.errors import ConfigError, UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.batch_norm.collect import audit_batch_norm
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm
from workbench.topics.batch_norm.statistics import batch_statistics
from workbench.train.batch_norm import ghost_batch_norm, replace_batch_norm
from workbench.train.distributed import batch_norm as hosts_batch_norm
from workbench.train.distributed.batch_norm import gather_running_statistics, synchronise_batch_norm
from workbench.workloads.base import first_of_batch


def loader(count: int = 20, *, examples: int = 64, shape: tuple[int, ...] = (4,)) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(3 + 2 * torch.randn(examples, *shape, generator=generator),) for _ in range(count)]


def warmed(model: nn.Module, batches: list[tuple[Tensor]]) -> nn.Module:
    with torch.no_grad():
        for (x,) in batches:
            model(x)
    return model


def statuses(model: nn.Module, batches: Any = None, **given: Any) -> dict[str, str]:
    return {f.code.partition(".")[2]: f.status for f in audited(model, batches, **given)}


def audited(model: nn.Module, batches: Any = None, **given: Any) -> Diagnosis:
    return diagnose_batch_norm(audit_batch_norm(model, batches, **given))


LIVE = ("ghost_size", "small_batch", "cold_ema", "stale")


# Frozen layers normalise with the same statistics in training and in evaluation.


class Frozen(nn.Module):
    """A pretrained layer that stays in evaluation mode, as in fine-tuning."""

    def __init__(self, *, by_train: bool) -> None:
        super().__init__()
        self.norm, self.head, self.by_train = nn.BatchNorm1d(4), nn.Linear(4, 1), by_train
        self.norm.running_mean.fill_(50.0)  # type: ignore[union-attr]
        self.norm.num_batches_tracked.fill_(1000)  # type: ignore[union-attr]
        self.norm.eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        if self.by_train:
            self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


@pytest.mark.parametrize("by_train", [False, True])
def test_frozen_statistics_are_neither_stale_nor_of_a_small_batch(by_train: bool) -> None:
    model = Frozen(by_train=by_train)
    for batches in (loader(), loader(examples=2), loader(examples=1)):
        found = audited(model, batches)
        assert {found[f"batch_norm.{code}"].status for code in LIVE} == {"ok"}
        assert "frozen" in found["batch_norm.stale"].summary
    assert not model.norm.training


def test_the_same_statistics_in_a_layer_that_trains_are_stale() -> None:
    model = Frozen(by_train=False).train()
    found = statuses(model, loader(examples=2))
    assert (found["stale"], found["small_batch"]) == ("warn", "warn")
    assert statuses(model.eval(), loader())["stale"] == "warn", "a whole model in evaluation mode may have been trained"


def test_frozen_beside_trained_layers_leaves_those_to_be_judged() -> None:
    model = nn.Sequential(Frozen(by_train=False).norm, nn.BatchNorm1d(4))
    model[1].train()
    found = audited(warmed(model, loader(10)), loader())
    assert found["batch_norm.cold_ema"].status == "warn"
    assert [row["layer"] for row in found["batch_norm.cold_ema"].evidence["layers"]] == ["1"]
    assert found["batch_norm.stale"].status == "ok"


class Branches(nn.Module):
    """A layer that is built and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_a_layer_that_is_never_called_is_not_cold() -> None:
    model = warmed(Branches(), loader(60))
    assert statuses(model, loader())["cold_ema"] == "ok"
    assert statuses(warmed(Branches(), loader(6)), loader())["cold_ema"] == "fail"


def test_statistics_that_came_without_a_count_are_not_cold() -> None:
    model = warmed(nn.Sequential(nn.BatchNorm1d(4)), loader(60))
    model[0].num_batches_tracked.zero_()  # type: ignore[index,operator,union-attr]
    assert statuses(model, loader())["cold_ema"] == "ok"
    assert statuses(model, loader())["stale"] == "ok"
    other = [(x + 5,) for (x,) in loader()]
    assert statuses(model, other)["stale"] == "warn", "they are compared all the same"
    assert statuses(nn.Sequential(nn.BatchNorm1d(4)))["cold_ema"] == "fail"


# A layer that is called several times a batch.


class Twice(nn.Module):
    """Siamese: one layer for two inputs that are not alike; the second call may be left out."""

    def __init__(self, *, skip: bool = False) -> None:
        super().__init__()
        self.norm, self.skip, self.calls = nn.BatchNorm1d(4), skip, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.norm(x)
        return out if self.skip and self.calls % 3 == 0 else out + self.norm(input=2 * x + 7)


def test_a_shared_layer_is_held_against_all_that_it_is_given() -> None:
    model = warmed(Twice(), loader(200))
    assert statuses(model, loader())["stale"] == "ok"
    seen = batch_statistics(model, loader(5), first_of_batch)["norm"]
    assert seen.batch.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    every = torch.cat([t for (x,) in loader(5) for t in (x, 2 * x + 7)]).double()
    np.testing.assert_allclose(seen.together[0], every.mean(0), rtol=1e-5)
    np.testing.assert_allclose(seen.together[1], every.var(0, correction=0), rtol=1e-5)
    assert statuses(model, [(x - 20,) for (x,) in loader()])["stale"] == "warn"


# Batches.


def test_the_incomplete_last_batch_does_not_stand_for_all() -> None:
    data = TensorDataset(torch.randn(10 * 64 + 3, 4, generator=torch.Generator().manual_seed(0)))
    batches = DataLoader(data, batch_size=64)
    model = warmed(nn.Sequential(nn.BatchNorm1d(4)), [*batches] * 6)
    found = audited(model, batches)
    assert found["batch_norm.small_batch"].status == "ok"
    assert found["batch_norm.small_batch"].value == 64
    asked = audited(ghost_batch_norm(copy.deepcopy(model), 64), batches)["batch_norm.ghost_size"]
    assert (asked.status, asked.value) == ("ok", 64)


def test_a_last_batch_of_one_is_a_fault_and_no_crash() -> None:
    data = TensorDataset(torch.randn(10 * 64 + 1, 4, generator=torch.Generator().manual_seed(0)))
    model = warmed(nn.Sequential(nn.BatchNorm1d(4)), loader(60))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = audited(model, DataLoader(data, batch_size=64))["batch_norm.small_batch"]
    assert found.status == "fail"
    assert "1 of the training batches" in found.summary
    assert "drop_last=True" in found.advice[0]
    assert audited(model, DataLoader(data, batch_size=64, drop_last=True))["batch_norm.small_batch"].status == "ok"
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert statuses(model, loader(3, examples=1))["small_batch"] == "fail"


def test_few_examples_of_many_independent_values_are_no_small_batch() -> None:
    """White images of 64 places: 4 of them make statistics as steady as those of 256 examples; constant images as those of 4."""
    white = loader(20, examples=4, shape=(3, 8, 8))
    flat = [(x[:, :, :1, :1].expand_as(x),) for (x,) in loader(20, examples=4, shape=(3, 8, 8))]
    for batches, status, independent in ((white, "ok", 256), (flat, "warn", 4)):
        found = audited(warmed(nn.Sequential(nn.BatchNorm2d(3)), batches * 4), batches)["batch_norm.small_batch"]
        assert found.status == status
        assert found.value == 4
        assert found.evidence["independent"] == pytest.approx(independent, rel=0.5)
    few = audited(nn.Sequential(nn.BatchNorm2d(3)), white[:7])["batch_norm.small_batch"]
    assert (few.status, few.evidence["independent"]) == ("warn", None), "seven calls do not tell their spread"


def test_batches_may_be_tensors_and_an_empty_loader_is_named() -> None:
    model = warmed(nn.Sequential(nn.BatchNorm1d(4)), loader(60))
    assert statuses(model, [x for (x,) in loader()])["stale"] == "ok"
    with pytest.raises(UsageError, match="batches yields nothing"):
        audit_batch_norm(model, [])


# Kinds of layers.


def test_without_running_statistics_the_size_of_the_batch_still_counts() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False))
    assert statuses(model, loader())["small_batch"] == "ok"
    found = audited(model, loader(examples=3))
    assert (found["batch_norm.small_batch"].status, found["batch_norm.small_batch"].value) == ("warn", 3)
    assert found["batch_norm.stale"].status == found["batch_norm.cold_ema"].status == "ok"
    seen = batch_statistics(model, loader(2), first_of_batch)["0"]
    np.testing.assert_allclose(seen.mean, [x.mean(0) for (x,) in loader(2)], rtol=1e-5)
    np.testing.assert_allclose(seen.variance, [x.var(0) for (x,) in loader(2)], rtol=1e-5)


@pytest.mark.parametrize("stat_examples", [None, 12])
def test_a_synchronised_layer_counts_the_examples_of_all_processes(
    stat_examples: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: nn.Module = nn.Sequential(nn.BatchNorm1d(4))
    if stat_examples is not None:
        ghost_batch_norm(model, stat_examples)
    model = warmed(synchronise_batch_norm(model), loader(60, examples=8))
    assert audited(model, loader(examples=8))["batch_norm.small_batch"].value == 8
    monkeypatch.setattr("workbench.topics.batch_norm.statistics.statistic_processes", lambda _: 4)
    found = audited(model, loader(examples=8))
    assert found["batch_norm.small_batch"].value == (stat_examples or 32)
    assert found["batch_norm.ghost_size"].status == "ok"


def test_statistics_of_one_process_are_those_of_layers_that_nobody_synchronised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts_batch_norm, "place", lambda _: (0, 4))
    layer = nn.BatchNorm1d(4)
    assert hosts_batch_norm.statistic_processes(layer) == 1
    assert hosts_batch_norm.statistic_processes(nn.SyncBatchNorm(4)) == 1, "no process group"
    assert hosts_batch_norm.statistic_processes(synchronise_batch_norm(layer)) == 4


class WithActivation(nn.BatchNorm1d):
    """Batch norm and an activation in one, as some model libraries have it."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


class WithSettings(nn.BatchNorm1d):
    """Settings of its own and nothing else."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=0.01)


@pytest.mark.parametrize("convert", [synchronise_batch_norm, lambda m: replace_batch_norm(m, "layer"), lambda m: ghost_batch_norm(m, 8)])  # fmt: skip
def test_what_a_layer_does_beside_batch_norm_is_never_lost(convert: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), WithActivation(4))
    with pytest.raises(ConfigError, match=r"WithActivation has a forward of its own \(layer '1'\)"):
        convert(model)
    assert isinstance(model[1], WithActivation)
    assert not isinstance(convert(nn.Sequential(WithSettings(4)))[0], WithSettings)
    assert statuses(warmed(model, loader(60)), loader())["stale"] == "ok", "to look at it is no trouble"


@pytest.mark.parametrize("convert", [synchronise_batch_norm, lambda m: replace_batch_norm(m, "layer"), lambda m: ghost_batch_norm(m, 8), audit_batch_norm])  # fmt: skip
def test_a_lazy_layer_has_to_see_a_batch_first(convert: Any) -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(ConfigError, match=r"'0' \(LazyBatchNorm1d\) does not know its channels yet"):
        convert(model)
    model(loader()[0][0])
    convert(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_known_by_the_names_of_its_checkpoint(tmp_path: Path) -> None:
    plain = warmed(nn.Sequential(nn.BatchNorm1d(4)), loader(60))
    compiled: Any = torch.compile(plain, backend="eager")
    torch.save(plain.state_dict(), tmp_path / "last.pt")
    assert list(gather_running_statistics(compiled)) == list(gather_running_statistics(plain)) == ["0"]
    for model, replicas in ((compiled, [plain.state_dict()] * 2), (plain, [compiled.state_dict()] * 2)):
        found = statuses(model, loader(), replicas=replicas, checkpoint=tmp_path / "last.pt")
        assert set(found.values()) == {"ok"}


# Dead channels have no variance that differences could be measured by.


def replicas(model: nn.Module, shift: float, scale: float) -> Iterator[dict[str, Tensor]]:
    for rank in range(3):
        state = copy.deepcopy(model.state_dict())
        state["0.running_mean"][0] += shift * rank
        state["0.running_var"][0] = scale * (1 + rank)
        yield state


@pytest.mark.parametrize(("shift", "scale", "status"), [(1e-9, 1e-20, "ok"), (0.0, 1e-30, "ok"), (1e-3, 1e-20, "warn")])
def test_rounding_in_a_dead_channel_is_no_difference(shift: float, scale: float, status: str) -> None:
    model = warmed(nn.Sequential(nn.BatchNorm1d(4)), loader(60)).double()
    states = list(replicas(model, shift, scale))
    found = statuses(model, replicas=states, checkpoint=states[0])
    assert found["rank_local"] == found["first_device_ema"] == status
    assert (found["variance_of_means"] == "ok") == (status == "ok")


@pytest.mark.parametrize("examples", [3, 16, 64])
def test_independent_normal_values_count_as_many_as_they_are(examples: int) -> None:
    seen = batch_statistics(nn.BatchNorm1d(200), loader(200, examples=examples, shape=(200,)), first_of_batch)[""]
    assert seen.independent == pytest.approx(examples, rel=0.15)
    dead = [(x * (torch.arange(200) % 2),) for (x,) in loader(200, examples=examples, shape=(200,))]
    half = batch_statistics(nn.BatchNorm1d(200), dead, first_of_batch)[""]
    assert half.independent == pytest.approx(examples, rel=0.15)
    assert batch_statistics(nn.BatchNorm1d(4), [(torch.ones(8, 4),)] * 9, first_of_batch)[""].independent is None
