"""What batch norm keeps, measured on models whose statistics are known; what checkpoints and replicas hold of them; and the study."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from tests.helpers.lane_models import MODELS, lane_workload
from workbench.config import TrainConfig
from workbench.errors import CheckpointError, ConfigError, UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.record.read import StudyRecord
from workbench.studies.session import open_session
from workbench.topics.batch_norm.collect import collect_batch_norm, measure_devices
from workbench.topics.batch_norm.diagnose import read_norm_arms
from workbench.topics.batch_norm.replicas import CODES
from workbench.topics.batch_norm.statistics import batch_statistics, running_statistics, statistics_set
from workbench.train.distributed import batch_norm as distributed
from workbench.workloads.base import Workload, first_of_batch
from workbench.workloads.batch_norm import ghost_batch_norm
from workbench.workloads.losses import classification

MEAN, SD = 3.0, 2.0
PROCESSES = ("rank_local", "first_device_ema", "variance_of_means")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))


def loader(
    count: int = 60, *, mean: float = MEAN, examples: int = 64, shape: tuple[int, ...] = (4,)
) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(mean + SD * torch.randn(examples, *shape, generator=generator),) for _ in range(count)]


def warmed(model: nn.Module | None = None, batches: list[tuple[Tensor]] | None = None) -> Any:
    model = model or net()
    with torch.no_grad():
        for (x,) in loader() if batches is None else batches:
            model(x)
    return model


def audited(model: nn.Module, *args: Any, **options: Any) -> Diagnosis:
    return wb.batch_norm.diagnose(wb.batch_norm.audit(model, *args, **options))


def statuses(model: nn.Module, *args: Any, **options: Any) -> dict[str, str]:
    return {f.code.partition(".")[2]: f.status for f in audited(model, *args, **options)}


# What a layer makes and keeps.


def test_statistics_are_those_of_the_examples_and_their_average_is_what_a_layer_keeps() -> None:
    batches = loader(80)
    seen = batch_statistics(net(), batches, first_of_batch)["0"]
    for row, (x,) in enumerate(batches[:3]):
        np.testing.assert_allclose(seen.mean[row], x.mean(0), rtol=1e-5)
        np.testing.assert_allclose(seen.variance[row], x.var(0), rtol=1e-5)
    every = torch.cat([x for (x,) in batches]).double()
    np.testing.assert_allclose(seen.together[0], every.mean(0), rtol=1e-5)
    np.testing.assert_allclose(seen.together[1], every.var(0, correction=0), rtol=1e-5)
    assert seen.examples.tolist() == seen.values.tolist() == [64] * 80
    mean, variance, count = running_statistics(warmed(batches=batches)[0])
    assert count == 80
    np.testing.assert_allclose(seen.average(0.1)[0], mean, rtol=1e-3)
    np.testing.assert_allclose(seen.average(0.1)[1], variance, rtol=1e-3)


def bits(model: nn.Module) -> tuple[Any, ...]:
    layers = [(m.training, getattr(m, "momentum", None), len(m._forward_pre_hooks)) for m in model.modules()]
    return layers, {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()


def _breaks(model: nn.Module, batch: Any) -> None:
    model(batch[0])
    raise RuntimeError("planted")


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_look_leaves_the_model_as_it_was(evaluating: bool) -> None:
    model = warmed().train(not evaluating)
    model[3].eval()
    before = bits(model)
    wb.batch_norm.audit(model, loader())
    with statistics_set(model, {"0": (np.zeros(4), np.full(4, 7.0))}):
        assert running_statistics(model[0])[1].tolist() == [7.0] * 4
    with pytest.raises(RuntimeError, match="planted"):
        batch_statistics(model, loader(2), _breaks)
    after = bits(model)
    assert before[0] == after[0]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("examples", [3, 64])
def test_independent_normal_values_count_as_many_as_they_are(examples: int) -> None:
    seen = batch_statistics(nn.BatchNorm1d(200), loader(200, examples=examples, shape=(200,)), first_of_batch)[""]
    assert seen.independent == pytest.approx(examples, rel=0.15)
    assert batch_statistics(nn.BatchNorm1d(4), [(torch.ones(8, 4),)] * 9, first_of_batch)[""].independent is None


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


# What is found in somebody's own model.


def test_a_healthy_model_raises_no_alarm_and_what_nobody_gave_is_not_measured() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        found = statuses(warmed(batches=loader(70)), loader(30))
        assert found == {c.partition(".")[2]: "ok" for c in CODES} | dict.fromkeys(PROCESSES, "not_measured")
    assert [code for code, status in statuses(warmed()).items() if status == "ok"] == ["cold_ema"]
    assert set(statuses(nn.Linear(4, 4), loader(2)).values()) == {"ok"}


@pytest.mark.parametrize(
    ("batches", "momentum", "warm", "status"),
    [
        (22, 0.1, 1 - 0.9**22, "ok"), (21, 0.1, 1 - 0.9**21, "warn"), (6, 0.1, 1 - 0.9**6, "fail"), (0, 0.1, 0.0, "fail"),
        (1, None, 1.0, "ok"), (50, 0.0, 0.0, "fail"),
    ],
)  # fmt: skip
def test_a_cold_average_is_found_by_how_much_of_it_is_there(
    batches: int, momentum: float | None, warm: float, status: str
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=momentum))
    found = audited(warmed(model, loader(batches)) if batches else model)["batch_norm.cold_ema"]
    assert (found.status, found.value) == (status, pytest.approx(warm, rel=1e-12))


def test_statistics_that_came_without_a_count_are_not_cold() -> None:
    model = warmed(nn.Sequential(nn.BatchNorm1d(4)), loader(60))
    model[0].num_batches_tracked.zero_()  # type: ignore[index,operator,union-attr]
    found = statuses(model, loader())
    assert (found["cold_ema"], found["stale"]) == ("ok", "ok")
    assert statuses(model, [(x + 5,) for (x,) in loader()])["stale"] == "warn", "they are compared all the same"


@pytest.mark.parametrize("shift", [1.0, -3.0])
def test_statistics_of_other_data_or_weights_are_stale(shift: float) -> None:
    def shifts(model: nn.Module) -> dict[str, float]:
        found = audited(model, loader(30))["batch_norm.stale"]
        assert found.status == "warn"
        return {row["layer"]: row["shift"] for row in found.evidence["layers"]}

    assert shifts(warmed(batches=loader(mean=MEAN + shift * SD)))["0"] == pytest.approx(abs(shift), rel=0.1)
    model = warmed()
    with torch.no_grad():
        model[1].weight.mul_(3.0)
    found = shifts(model)
    assert found["0"] < 0.25
    assert found["3"] == pytest.approx(np.log(3.0), abs=0.3)
    model[0].running_mean[1] = math.nan
    assert statuses(model, loader(5))["stale"] == "not_measured"


def test_a_cold_or_a_noisy_average_is_not_called_stale() -> None:
    found = statuses(warmed(batches=loader(10)), loader(30))
    assert (found["cold_ema"], found["stale"]) == ("warn", "ok")
    tiny = audited(warmed(nn.Sequential(nn.BatchNorm1d(4)), loader(400, examples=2)), loader(20, examples=2))
    assert tiny["batch_norm.stale"].status == "ok"
    assert (tiny["batch_norm.small_batch"].status, tiny["batch_norm.small_batch"].value) == ("warn", 2)


# Checkpoints and replicas: what was written is one of these.


def replicas(count: int = 4) -> list[dict[str, Tensor]]:
    states = [copy.deepcopy(warmed().state_dict()) for _ in range(count)]
    for rank, state in enumerate(states):
        state["0.running_mean"] += 2.0 * rank - 3
    return states


def written(states: list[dict[str, Tensor]], how: str) -> dict[str, Tensor]:
    state = copy.deepcopy(states[2 if how == "third" else 0])
    for name in ("0", "3"):
        means, variances = (torch.stack([s[f"{name}.running_{kind}"] for s in states]) for kind in ("mean", "var"))
        if how in ("merged", "average"):
            state[f"{name}.running_mean"] = means.mean(0)
            state[f"{name}.running_var"] = variances.mean(0) + (means.var(0, correction=0) if how == "merged" else 0)
        elif how == "other":
            state[f"{name}.running_mean"] = means.mean(0) + 10
    return state


PLANTED = {
    "first": ("fail", "fail", "warn"),
    "third": ("fail", "fail", "warn"),
    "merged": ("ok", "ok", "ok"),
    "average": ("ok", "ok", "fail"),
    "other": ("fail", "not_measured", "warn"),
}


@pytest.mark.parametrize(
    ("how", "form"), list(zip(PLANTED, ["dict", "wrapped", "nested", "torch", "safetensors"], strict=True))
)
def test_what_a_checkpoint_holds_of_the_replicas_is_named(how: str, form: str, tmp_path: Path) -> None:
    states = replicas()
    state: Any = written(states, how)
    if form == "wrapped":
        state = {f"module.{name}": t for name, t in state.items()}
    if form == "nested":
        state = {"step": 3, "model": {f"_orig_mod.{name}": t for name, t in state.items()}}
    if form == "torch":
        torch.save({"state_dict": state}, tmp_path / "last.pt")
        state = tmp_path / "last.pt"
    if form == "safetensors":
        from safetensors.torch import save_file

        save_file(state, tmp_path / "last.safetensors")
        state = tmp_path / "last.safetensors"
    found = audited(warmed(), replicas=states, checkpoint=state)
    codes = ("rank_local", "first_device_ema", "variance_of_means")
    assert tuple(found[f"batch_norm.{code}"].status for code in codes) == PLANTED[how]
    if how in ("first", "third"):
        assert f"of process {0 if how == 'first' else 2} alone" in found["batch_norm.first_device_ema"].summary


def test_the_six_that_averaging_turns_into_one() -> None:
    states = [nn.BatchNorm1d(1).state_dict() for _ in range(4)]
    for rank, state in enumerate(states):
        state["running_mean"] += 2.0 * rank - 3
    finding = audited(nn.BatchNorm1d(1), replicas=states)["batch_norm.variance_of_means"]
    assert finding.status == "warn"
    assert (finding.evidence["merged"], finding.evidence["average"]) == (6.0, 1.0)
    assert finding.value == pytest.approx(5 / 6)
    merged = {"running_mean": torch.tensor([1.5]), "running_var": torch.tensor([1 + 36 * 0.25 * 0.75])}
    weighted = audited(nn.BatchNorm1d(1), replicas=states, examples=[1, 0, 0, 3], checkpoint=merged)
    assert weighted["batch_norm.variance_of_means"].evidence["merged"] == 1 + 36 * 0.25 * 0.75
    assert weighted["batch_norm.variance_of_means"].value == pytest.approx(6.75 / 7.75)
    assert weighted["batch_norm.first_device_ema"].status == "ok"
    equal = audited(nn.BatchNorm1d(1), replicas=states, checkpoint=merged)
    assert equal["batch_norm.first_device_ema"].status == "not_measured", "weights that nobody gave are equal"
    wider = [states[0], states[0] | {"running_var": torch.tensor([1.21])}]
    found = audited(nn.BatchNorm1d(1), replicas=wider)["batch_norm.rank_local"]
    assert (found.status, found.value) == ("warn", pytest.approx(0.1 / math.sqrt(2.21 / 2), rel=1e-5))


HARM: dict[str, tuple[float, list[float] | None, str]] = {
    "nobody says": (0.1, None, "warn"),
    "within the threshold": (0.1, [0.50, 0.52], "warn"),
    "beyond it": (0.1, [0.50, 0.54], "fail"),
    "one is lost": (0.1, [0.5, math.nan], "fail"),
    "all are lost": (0.1, [math.nan, math.inf], "warn"),
    "the distance tells": (1.5, None, "fail"),
    "far apart and alike": (1.5, [0.5, 0.5], "warn"),
    "both are 0": (0.1, [0.0, 0.0], "warn"),
}


@pytest.mark.parametrize("case", HARM)
def test_statistics_of_one_process_fail_where_they_do_harm(case: str) -> None:
    apart, metrics, status = HARM[case]
    states = [warmed().state_dict() for _ in range(2)]
    states[1]["0.running_mean"][2] += apart * states[0]["0.running_var"][2].sqrt()
    given: dict[str, Any] = {"replicas": states, "checkpoint": states[0], "metrics": metrics}
    found = audited(warmed(), **given)
    assert found["batch_norm.rank_local"].status == found["batch_norm.first_device_ema"].status == status
    assert found["batch_norm.first_device_ema"].value == pytest.approx(0, abs=1e-6), "it is the first one's"


def test_replicas_that_are_equal_or_not_finite_are_no_alarm() -> None:
    states = replicas(3)
    for same in ([states[0]] * 3, states[:1]):
        found = statuses(warmed(), replicas=same, checkpoint=states[0])
        assert [found[code] for code in PROCESSES] == ["ok"] * 3
    states[2]["0.running_mean"][0] = math.inf
    found = statuses(warmed(), replicas=states)
    assert [found[code] for code in PROCESSES] == ["not_measured"] * 3


@pytest.mark.parametrize(("shift", "scale", "status"), [(1e-9, 1e-20, "ok"), (1e-3, 1e-20, "warn")])
def test_rounding_in_a_dead_channel_is_no_difference(shift: float, scale: float, status: str) -> None:
    model = warmed(nn.Sequential(nn.BatchNorm1d(4))).double()
    states = [copy.deepcopy(model.state_dict()) for _ in range(3)]
    for rank, state in enumerate(states):
        state["0.running_mean"][0] += shift * rank
        state["0.running_var"][0] = scale * (1 + rank)
    found = statuses(model, replicas=states, checkpoint=states[0])
    assert found["rank_local"] == found["first_device_ema"] == status
    assert (found["variance_of_means"] == "ok") == (status == "ok")


def test_a_checkpoint_from_others_is_read_without_running_what_is_in_it(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was run",))

    torch.save({"model": Harm()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"bad\.pt cannot be read: UnpicklingError"):
        wb.batch_norm.audit(net(), checkpoint=tmp_path / "bad.pt")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wb.batch_norm.audit(net(), []), UsageError, "batches yields nothing"),
        (lambda: wb.batch_norm.audit(net(), replicas=[{}]), UsageError, r"replicas\[0\] has no running statistics of '0'"),
        (lambda: wb.batch_norm.audit(net(), replicas={}), UsageError, "replicas has no layer '0'"),
        (lambda: wb.batch_norm.audit(net(), replicas=replicas(2), examples=[1]), UsageError, "1 numbers for 2 replicas"),
        (lambda: wb.batch_norm.audit(net(), replicas=replicas(2), metrics=[1]), UsageError, "metrics has 1 numbers for 2"),
        (lambda: wb.batch_norm.audit(net(), metrics=[1, 1]), UsageError, "give replicas="),
        (lambda: wb.batch_norm.audit(net(), checkpoint={}), CheckpointError, "holds no running statistics of Sequential"),
        (lambda: wb.batch_norm.audit(net(), checkpoint="nowhere.pt"), CheckpointError, "nowhere.pt cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_so(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# Models and loaders as people have them.


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
    for batches in (loader(20), loader(20, examples=1)):
        found = audited(model, batches)
        assert {found[code].status for code in list(CODES)[3:]} == {"ok"}
        assert "frozen" in found["batch_norm.stale"].summary
    assert not model.norm.training
    if not by_train:
        trained = statuses(model.train(), loader(20, examples=2))
        assert (trained["stale"], trained["small_batch"]) == ("warn", "warn")
        assert statuses(model.eval(), loader(20))["stale"] == "warn", (
            "a whole model in evaluation mode may have been trained"
        )


def test_the_last_batch_of_an_epoch_may_be_small_and_one_of_one_is_a_fault_and_no_crash() -> None:
    model = warmed(nn.Sequential(nn.BatchNorm1d(4)))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    small, one = (TensorDataset(torch.cat([x for (x,) in loader(11)])[: 640 + rest]) for rest in (3, 1))
    found = audited(model, DataLoader(small, batch_size=64))["batch_norm.small_batch"]
    assert (found.status, found.value) == ("ok", 64)
    asked = audited(ghost_batch_norm(copy.deepcopy(model), 64), DataLoader(small, batch_size=64))[
        "batch_norm.ghost_size"
    ]
    assert (asked.status, asked.value) == ("ok", 64)
    found = audited(model, DataLoader(one, batch_size=64))["batch_norm.small_batch"]
    assert found.status == "fail"
    assert "1 of the training batches" in found.summary
    assert audited(model, DataLoader(one, batch_size=64, drop_last=True))["batch_norm.small_batch"].status == "ok"
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


@pytest.mark.parametrize("stat_examples", [None, 12])
def test_a_synchronised_layer_counts_the_examples_of_all_processes(
    stat_examples: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(4))
    if stat_examples is not None:
        ghost_batch_norm(model, stat_examples)
    model = warmed(wb.batch_norm.synchronise(model), loader(60, examples=8))
    assert audited(model, loader(20, examples=8))["batch_norm.small_batch"].value == 8
    monkeypatch.setattr(distributed, "place", lambda _: (0, 4))
    processes = [distributed.statistic_processes(layer) for layer in (nn.BatchNorm1d(4), nn.SyncBatchNorm(4), model[0])]
    assert processes == [1, 1, 4], "torch's has no process group here"
    monkeypatch.setattr(distributed, "place", lambda _: (0, 1))
    monkeypatch.setattr("workbench.topics.batch_norm.statistics.statistic_processes", lambda _: 4)
    found = audited(model, loader(20, examples=8))
    assert found["batch_norm.small_batch"].value == (stat_examples or 32)
    assert found["batch_norm.ghost_size"].status == "ok"
    bare = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False))
    seen = batch_statistics(bare, loader(2), first_of_batch)["0"]
    np.testing.assert_allclose(seen.mean, [x.mean(0) for (x,) in loader(2)], rtol=1e-5)
    np.testing.assert_allclose(seen.variance, [x.var(0) for (x,) in loader(2)], rtol=1e-5)
    assert {audited(bare, loader(20))[f"batch_norm.{code}"].status for code in ("stale", "cold_ema")} == {"ok"}


# In a study.


def test_the_facts_of_a_study_are_those_of_its_last_checkpoint(tmp_path: Path) -> None:
    workload = lane_workload(MODELS["conv"])
    config = workload.config.replace(total_steps=60, bn_stat_examples=3)
    with open_session(workload.replace(config=config), stem="x", settings={}, trainer=wb.Trainer(gradients="loop"), out=tmp_path / "s") as session:  # fmt: skip
        facts = collect_batch_norm(session)
        torch.rand(3)
        assert collect_batch_norm(session) == facts, "what is drawn on the way is the same each time"
        session.facts(batch_norm=facts)
        found = wb.batch_norm.diagnose(session.record)
        evals = session.trial(config, stage="baseline").evals
    ends = evals[(evals["split"] == "validation") & (evals["metric"] == "loss") & (evals["step"] == 60)]["value"]
    assert (facts["layers"], facts["asked"], facts["examples"], facts["step"]) == (1, 3, 3, 60)
    assert facts["ema"][0]["batches"] == 60
    losses = facts["loss"]
    assert losses["stored"] == pytest.approx(ends.iloc[0], rel=1e-5)
    assert losses["anew"] != losses["stored"], "other statistics, another loss"
    assert found["batch_norm.stale"].status == "ok"


CLASSES, APART = 4, 5.0
STUDY = wb.batch_norm.Study(stat_examples=[8, 16, 64], batch_sizes=[16, 32], held=16, swap_batch_sizes=[4], lr_factors=[0.5, 1.0], seeds=2)  # fmt: skip


def workload(*, norm: bool = True, examples: int = 128) -> Workload:
    """Four classes whose first feature says which: sorted by label, each of four devices sees one."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(examples) % CLASSES
    x = torch.randn(examples, 3, generator=generator)
    x[:, 0] += APART * labels
    layers: list[Callable[[], nn.Module]] = [lambda: nn.BatchNorm1d(3)] if norm else []
    return classification(
        name="four",
        build_model=lambda: nn.Sequential(
            *(make() for make in layers), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, CLASSES)
        ),
        train_data=TensorDataset(x, labels),
        validation_data=TensorDataset(x[:32], labels[:32]),
        config=TrainConfig(peak_lr=0.05, total_steps=30, batch_size=32),
    )


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    return STUDY.run(workload(), wb.Trainer(device="cpu", gradients="loop"), out=tmp_path_factory.mktemp("bn") / "s")


def arms(record: StudyRecord, stage: str) -> dict[tuple[int | None, int, int], int]:
    found = read_norm_arms(record, f"batch_norm_{stage}")
    return {(a["stat_examples"], a["batch_size"], a["devices"]): len(a["seeds"]) for a in found}


def test_every_arm_is_trained_under_every_seed_and_no_trial_twice(record: StudyRecord) -> None:
    assert arms(record, "virtual") == {(8, 32, 1): 2, (16, 32, 1): 2, (None, 32, 1): 2}
    assert arms(record, "held") == {(None, 16, 1): 2, (16, 32, 1): 2, (None, 32, 1): 2}
    assert arms(record, "split") == {(None, 32, devices): 2 for devices in (1, 2, 4, 8)}
    rows = record.facts["batch_norm_swap"]
    assert {(row["norm"], row["batch_size"], row["lr"]) for row in rows} == {
        (norm, 4, lr) for norm in ("batch", "layer", "group") for lr in (0.025, 0.05)
    }
    assert all(len(row["values"]) == 2 and math.isfinite(row["mean"]) for row in rows)
    means = {(row["norm"], row["lr"]): row["mean"] for row in rows}
    assert all(means["batch", lr] != means["layer", lr] for lr in (0.025, 0.05)), "another norm trains otherwise"
    assert len(record.trials) == 2 * (3 + 1 + 3 + 2), "virtual, held at 16, split, batch norm at batch size 4"
    assert not record.trials.duplicated(["batch_size", "bn_stat_examples", "accumulate_steps", "seed", "peak_lr"]).any()


def test_virtual_batches_differ_only_in_their_statistics_and_the_same_call_trains_nothing(record: StudyRecord) -> None:
    found = {row["stat_examples"]: row for row in read_norm_arms(record, "batch_norm_virtual")}
    assert [found[size]["statistic"] for size in (8, 16, None)] == [8, 16, 32]
    assert len({row["mean"] for row in found.values()}) == 3
    configs = [record.trial(number).config for number in record.facts["batch_norm_virtual"]]
    changed = {name for name in record.config for config in configs if config[name] != configs[0][name]}
    assert changed == {"bn_stat_examples", "shared_seed", "per_host_seed"}
    again = STUDY.run(workload(), wb.Trainer(device="cpu", gradients="loop"), out=record.path)
    assert again.trials["trial"].tolist() == record.trials["trial"].tolist()
    assert again.facts == record.facts
    diagnosis = wb.batch_norm.diagnose(record)
    assert [f.code for f in diagnosis] == list(CODES)
    assert diagnosis["batch_norm.first_device_ema"].status == "ok"
    assert "Norms at equal budgets" in diagnosis["batch_norm.small_batch"].summary
    assert "held at 16" in diagnosis["batch_norm.ghost_size"].summary


def test_a_model_without_batch_norm_trains_nothing_and_sizes_have_to_fit(tmp_path: Path) -> None:
    found = wb.batch_norm.Study(seeds=1).run(workload(norm=False), wb.Trainer(), out=tmp_path / "none")
    assert not len(found.trials)
    assert {f.status for f in wb.batch_norm.diagnose(found)} == {"ok"}
    with pytest.raises(UsageError, match="batch size 256 does not fit: the training split has 128"):
        wb.batch_norm.Study(batch_size=256, norms=[], seeds=1).run(workload(), wb.Trainer(), out=tmp_path / "large")
    fields: tuple[dict[str, Any], ...] = (
        {"held": True}, {"devices": [1.5]}, {"shards": "dealt"}, {"norms": ["batch"]}, {"lr_factors": [0]}, {"lr_factors": []},
    )  # fmt: skip
    for field in fields:
        with pytest.raises(ConfigError, match=next(iter(field))):
            wb.batch_norm.Study(**field)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    given = workload(examples=512)
    with open_session(
        given, stem="x", settings={}, trainer=wb.Trainer(), out=tmp_path_factory.mktemp("d") / "s"
    ) as session:
        torch.manual_seed(0)
        model = given.build_model()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        found = measure_devices(session, model, batch_size=32, devices=(1, 2, 4, 8, 32), shards=("dealt", "sorted"))
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    return {(row["shards"], row["devices"]): row for row in found}


def test_dealt_shards_part_by_sampling_noise_alone(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    for shards in ("dealt", "sorted"):
        row = rows[shards, 1]
        assert row["apart"] == row["step_apart"] == row["missing"] == 0, "one device has the whole batch"
        assert row["losses"]["own"] == [row["losses"]["whole"]] == [row["losses"]["merged"]]
    assert ("dealt", 32) not in rows, "a device needs 2 examples"
    for devices in (2, 4, 8):
        row = rows["dealt", devices]
        examples = 32 // devices
        expected = math.sqrt((1 - 1 / devices) / examples)  # of the mean of so many, about the mean over the devices
        assert row["step_apart"] == pytest.approx(expected, rel=0.25)
        assert row["apart"] < row["step_apart"], "a moving average is less noisy than a batch"
        assert row["missing"] < 0.05


def test_sorted_shards_are_missing_the_spread_of_the_means(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Of the first feature, with means 0, 5, 10, 15 on four devices: 31.25 of 32.25; nothing of the other two."""
    row = rows["sorted", 4]
    spread = float(np.var([0.0, APART, 2 * APART, 3 * APART]))
    assert row["missing"] == pytest.approx(spread / (spread + 1) / 3, rel=0.05)
    losses = row["losses"]
    assert abs(losses["merged"] / losses["whole"] - 1) < 0.05
    assert max(losses["own"]) / losses["whole"] > 1.2
