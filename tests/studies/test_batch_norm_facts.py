"""Facts about batch norm: measured on a model whose statistics are known, and the model left bit for bit as it was."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.lane_models import MODELS, lane_workload
from workbench.errors import CheckpointError, UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.studies.session import open_session
from workbench.topics.batch_norm.collect import audit_batch_norm, collect_batch_norm
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm
from workbench.topics.batch_norm.statistics import batch_statistics, running_statistics, statistics_set
from workbench.train.batch_norm import ghost_batch_norm
from workbench.train.trainer import Trainer
from workbench.workloads.base import first_of_batch

MEAN, SD, EXAMPLES = 3.0, 2.0, 64


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))


def loader(count: int = 60, *, mean: float = MEAN, examples: int = EXAMPLES) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(mean + SD * torch.randn(examples, 4, generator=generator),) for _ in range(count)]


def warmed(batches: list[tuple[Tensor]] | None = None) -> nn.Sequential:
    model = net()
    with torch.no_grad():
        for (x,) in batches or loader():
            model(x)
    return model


def audited(model: nn.Module, *args: Any, **options: Any) -> Diagnosis:
    return diagnose_batch_norm(audit_batch_norm(model, *args, **options))


def bits(model: nn.Module) -> tuple[Any, ...]:
    layers = [(m.training, getattr(m, "momentum", None), len(m._forward_pre_hooks)) for m in model.modules()]
    return layers, {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()


def test_statistics_of_each_batch_are_those_of_its_examples() -> None:
    model, batches = net(), loader(3)
    seen = batch_statistics(model, batches, first_of_batch)["0"]
    for row, (x,) in enumerate(batches):
        np.testing.assert_allclose(seen.mean[row], x.mean(0), rtol=1e-5)
        np.testing.assert_allclose(seen.variance[row], x.var(0), rtol=1e-5)
    every = torch.cat([x for (x,) in batches]).double()
    np.testing.assert_allclose(seen.together[0], every.mean(0), rtol=1e-5)
    np.testing.assert_allclose(seen.together[1], every.var(0, correction=0), rtol=1e-5)
    assert seen.examples.tolist() == seen.values.tolist() == [EXAMPLES] * 3


def test_an_average_of_batches_is_what_a_layer_keeps() -> None:
    batches = loader(80)
    model = warmed(batches)
    seen = batch_statistics(net(), batches, first_of_batch)["0"]
    mean, variance, count = running_statistics(model[0])
    assert count == 80
    np.testing.assert_allclose(seen.average(0.1)[0], mean, rtol=1e-3)
    np.testing.assert_allclose(seen.average(0.1)[1], variance, rtol=1e-3)


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_look_leaves_the_model_as_it_was(evaluating: bool) -> None:
    model = warmed().train(not evaluating)
    model[3].eval()
    before = bits(model)
    audit_batch_norm(model, loader())
    with pytest.raises(RuntimeError, match="planted"):
        batch_statistics(model, loader(2), _breaks)
    after = bits(model)
    assert before[0] == after[0]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    assert torch.equal(before[2], after[2])


def _breaks(model: nn.Module, batch: Any) -> None:
    model(batch[0])
    raise RuntimeError("planted")


def test_other_statistics_hold_inside_the_block_alone() -> None:
    model = warmed()
    before = running_statistics(model[0])
    with statistics_set(model, {"0": (np.zeros(4), np.full(4, 7.0))}):
        assert running_statistics(model[0])[1].tolist() == [7.0] * 4
    assert all(np.array_equal(a, b) for a, b in zip(before, running_statistics(model[0]), strict=True))


# What is found in somebody's own model.


def test_a_healthy_model_raises_no_alarm() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        found = audited(warmed(loader(70)), loader(30))
        for code in ("ghost_size", "small_batch", "cold_ema", "stale"):
            assert found[f"batch_norm.{code}"].status == "ok", found[f"batch_norm.{code}"].summary
        for code in ("rank_local", "first_device_ema", "variance_of_means"):
            assert found[f"batch_norm.{code}"].status == "not_measured"


@pytest.mark.parametrize(
    ("batches", "status"), [(60, "ok"), (22, "ok"), (21, "warn"), (10, "warn"), (6, "fail"), (0, "fail")]
)
def test_a_cold_average_is_found_by_how_much_of_it_is_there(batches: int, status: str) -> None:
    found = audited(warmed(loader(batches)) if batches else net())["batch_norm.cold_ema"]
    assert found.status == status
    assert found.value == pytest.approx(1 - 0.9**batches, rel=1e-12)


@pytest.mark.parametrize(("momentum", "status"), [(0.0, "fail"), (None, "ok"), (1.0, "ok"), (0.001, "fail")])
def test_every_momentum_has_its_warm_share(momentum: float | None, status: str) -> None:
    model = net()
    for layer in (model[0], model[3]):
        layer.momentum = momentum
    for (x,) in loader(50):
        model(x)
    assert audited(model)["batch_norm.cold_ema"].status == status


def test_a_cold_average_is_not_called_stale() -> None:
    model = warmed(loader(10))
    found = audited(model, loader(30))
    assert found["batch_norm.cold_ema"].status == "warn"
    assert found["batch_norm.stale"].status == "ok"


@pytest.mark.parametrize("shift", [1.0, -3.0])
def test_statistics_of_other_data_are_stale(shift: float) -> None:
    found = audited(warmed(loader(mean=MEAN + shift * SD)), loader(30))["batch_norm.stale"]
    assert found.status == "warn"
    layers = {row["layer"]: row["shift"] for row in found.evidence["layers"]}
    assert layers["0"] == pytest.approx(abs(shift), rel=0.1)


def test_statistics_of_other_weights_are_stale() -> None:
    model = warmed()
    with torch.no_grad():
        model[1].weight.mul_(3.0)
    found = audited(model, loader(30))["batch_norm.stale"]
    assert found.status == "warn"
    layers = {row["layer"]: row["shift"] for row in found.evidence["layers"]}
    assert layers["0"] < 0.25
    assert layers["3"] == pytest.approx(np.log(3.0), abs=0.3)


def test_noise_of_tiny_batches_is_not_staleness() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    for (x,) in loader(400, examples=2):
        model(x)
    found = audited(model, loader(20, examples=2))
    assert found["batch_norm.stale"].status == "ok"
    assert found["batch_norm.small_batch"].status == "warn"
    assert found["batch_norm.small_batch"].value == 2


@pytest.mark.parametrize(("examples", "asked", "status"), [(64, 64, "ok"), (256, 64, "ok"), (16, 64, "warn")])
def test_too_few_statistic_examples_are_found_on_the_live_model(examples: int, asked: int, status: str) -> None:
    model = ghost_batch_norm(nn.Sequential(nn.BatchNorm1d(4)), asked)
    found = audited(model, loader(3, examples=examples))["batch_norm.ghost_size"]
    assert (found.status, found.value, found.threshold) == (status, min(examples, asked), asked)


def test_values_that_are_not_finite_are_not_measured() -> None:
    model = warmed()
    model[0].running_mean[1] = float("nan")
    assert audited(model, loader(5))["batch_norm.stale"].status == "not_measured"


def test_a_model_without_batch_norm_or_running_statistics_has_nothing_to_find() -> None:
    assert {f.status for f in audited(nn.Linear(4, 4), loader(2))} == {"ok"}
    found = audited(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), loader(2))
    assert found["batch_norm.cold_ema"].status == found["batch_norm.stale"].status == "ok"


def test_nothing_given_is_not_measured() -> None:
    found = audited(warmed())
    assert {f.code for f in found if f.status == "ok"} == {"batch_norm.cold_ema"}
    assert {f.status for f in found} == {"ok", "not_measured"}


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
"""What was written, of replicas more than a standard deviation apart -> rank_local, first_device_ema, variance_of_means."""


@pytest.mark.parametrize("how", PLANTED)
@pytest.mark.parametrize("form", ["dict", "wrapped", "nested", "torch", "safetensors"])
def test_what_a_checkpoint_holds_of_the_replicas_is_named(how: str, form: str, tmp_path: Path) -> None:
    states = replicas()
    state: Any = written(states, how)
    if form == "wrapped":
        state = {f"module.{name}": t for name, t in state.items()}
    if form == "nested":
        state = {"step": 3, "model": state}
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
    weighted = audited(nn.BatchNorm1d(1), replicas=states, examples=[1, 0, 0, 3])["batch_norm.variance_of_means"]
    assert weighted.evidence["merged"] == 1 + 36 * 0.25 * 0.75
    assert weighted.value == pytest.approx(6.75 / 7.75)


@pytest.mark.parametrize(("factor", "status"), [(1.21, "warn"), (1.0, "ok")])
def test_variances_may_differ_where_means_do_not(factor: float, status: str) -> None:
    states = [warmed().state_dict() for _ in range(2)]
    states[1]["0.running_var"][2] *= factor
    finding = audited(warmed(), replicas=states)["batch_norm.rank_local"]
    assert finding.status == status
    assert finding.value == pytest.approx((math.sqrt(factor) - 1) / math.sqrt((1 + factor) / 2), rel=1e-5)


HARM: dict[str, tuple[float, list[float] | None, str]] = {
    "nobody says": (0.1, None, "warn"),
    "equal accuracies": (0.1, [0.983, 0.983], "warn"),
    "within the threshold": (0.1, [0.50, 0.52], "warn"),
    "beyond it": (0.1, [0.50, 0.54], "fail"),
    "one is lost": (0.1, [0.5, math.nan], "fail"),
    "all are lost": (0.1, [math.nan, math.inf], "warn"),
    "the distance tells": (1.5, None, "fail"),
    "far apart and alike": (1.5, [0.5, 0.5], "warn"),
    "both are 0": (0.1, [0.0, 0.0], "warn"),
    "about 0": (0.1, [-0.5, 0.5], "fail"),
}
"""Standard deviations of a channel that two processes are apart, and their metrics -> status."""


@pytest.mark.parametrize("case", HARM)
def test_statistics_of_one_process_fail_where_they_do_harm(case: str) -> None:
    apart, metrics, status = HARM[case]
    states = [warmed().state_dict() for _ in range(2)]
    states[1]["0.running_mean"][2] += apart * states[0]["0.running_var"][2].sqrt()
    given: dict[str, Any] = {"replicas": states, "checkpoint": states[0], "metrics": metrics}
    found = audited(warmed(), **given)
    assert found["batch_norm.rank_local"].status == found["batch_norm.first_device_ema"].status == status
    assert found["batch_norm.first_device_ema"].value == pytest.approx(0, abs=1e-6), "it is the first one's"
    equal = audited(warmed(), replicas=states[:1] * 2, checkpoint=states[0], metrics=metrics)
    assert equal["batch_norm.rank_local"].status == equal["batch_norm.first_device_ema"].status == "ok"


def test_what_counts_as_harm_is_an_argument() -> None:
    states = [warmed().state_dict() for _ in range(2)]
    states[1]["0.running_mean"][2] += states[0]["0.running_var"][2].sqrt()
    for metrics, name, limits in (([1.0, 1.1], "harm", (0.09, 0.11)), (None, "large_shift", (0.5, 1.5))):
        audit = audit_batch_norm(warmed(), replicas=states, checkpoint=states[0], metrics=metrics)
        for limit, status in zip(limits, ("fail", "warn"), strict=True):
            found = diagnose_batch_norm(audit, **{name: limit})
            assert found["batch_norm.rank_local"].status == found["batch_norm.first_device_ema"].status == status


def test_replicas_that_are_equal_raise_no_alarm() -> None:
    states = [warmed().state_dict()] * 3
    found = audited(warmed(), replicas=states, checkpoint=states[0])
    codes = ("rank_local", "first_device_ema", "variance_of_means")
    assert [found[f"batch_norm.{code}"].status for code in codes] == ["ok"] * 3
    alone = audited(warmed(), replicas=states[:1], checkpoint=states[0])
    assert [alone[f"batch_norm.{code}"].status for code in codes] == ["ok"] * 3


def test_replicas_weigh_by_their_examples() -> None:
    states = replicas(2)
    weighted = copy.deepcopy(states[0])
    for name in ("0", "3"):
        means, variances = (np.stack([s[f"{name}.running_{k}"].double() for s in states]) for k in ("mean", "var"))
        mean = 0.25 * means[0] + 0.75 * means[1]
        variance = (
            0.25 * variances[0] + 0.75 * variances[1] + 0.25 * (means[0] - mean) ** 2 + 0.75 * (means[1] - mean) ** 2
        )
        weighted[f"{name}.running_mean"], weighted[f"{name}.running_var"] = torch.tensor(mean), torch.tensor(variance)
    given: dict[str, Any] = {"replicas": states, "checkpoint": weighted}
    assert audited(warmed(), examples=[1, 3], **given)["batch_norm.first_device_ema"].status == "ok"
    assert audited(warmed(), **given)["batch_norm.first_device_ema"].status == "not_measured"


def test_replicas_that_are_not_finite_are_not_measured() -> None:
    states = replicas()
    states[2]["0.running_mean"][0] = float("inf")
    found = audited(warmed(), replicas=states)
    assert found["batch_norm.rank_local"].status == "not_measured"
    assert found["batch_norm.variance_of_means"].status == "not_measured"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: audit_batch_norm(3), UsageError, "model must be a torch.nn.Module, not int"),  # type: ignore[arg-type]
        (lambda: audit_batch_norm(net(), max_batches=0), UsageError, "max_batches=0"),
        (lambda: audit_batch_norm(net(), replicas=[{}]), UsageError, r"replicas\[0\] has no running statistics of '0'"),
        (lambda: audit_batch_norm(net(), replicas={}), UsageError, "replicas has no layer '0'"),
        (lambda: audit_batch_norm(net(), replicas=replicas(2), examples=[1]), UsageError, "1 numbers for 2 replicas"),
        (lambda: audit_batch_norm(net(), replicas=replicas(2), metrics=[1]), UsageError, "metrics has 1 numbers for 2"),
        (lambda: audit_batch_norm(net(), metrics=[1, 1]), UsageError, "give replicas="),
        (lambda: audit_batch_norm(net(), checkpoint={}), CheckpointError, "holds no running statistics of Sequential"),
        (lambda: audit_batch_norm(net(), checkpoint="nowhere.pt"), CheckpointError, "nowhere.pt cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_so(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# In a study.


def test_the_facts_of_a_study_are_those_of_its_last_checkpoint(tmp_path: Path) -> None:
    workload = lane_workload(MODELS["conv"])
    config = workload.config.replace(total_steps=60, bn_stat_examples=3)
    with open_session(workload.replace(config=config), stem="x", settings={}, trainer=Trainer(gradients="loop"), out=tmp_path / "s") as session:  # fmt: skip
        facts = collect_batch_norm(session)
        torch.rand(3)
        assert collect_batch_norm(session) == facts, "what is drawn on the way is the same each time"
        session.facts(batch_norm=facts)
        found = diagnose_batch_norm(session.record)
        evals = session.trial(config, stage="baseline").evals
    ends = evals[(evals["split"] == "validation") & (evals["metric"] == "loss") & (evals["step"] == 60)]["value"]
    assert (facts["layers"], facts["asked"], facts["examples"], facts["step"]) == (1, 3, 3, 60)
    assert facts["ema"][0]["batches"] == 60
    losses = facts["loss"]
    assert losses["stored"] == pytest.approx(ends.iloc[0], rel=1e-5)
    assert losses["anew"] == pytest.approx(losses["stored"], rel=0.5)
    assert losses["anew"] != losses["stored"], "other statistics, another loss"
    assert found["batch_norm.stale"].status == "ok"


def test_a_study_judges_layers_as_the_trainer_trains_them(tmp_path: Path) -> None:
    """The trainer calls `model.train()`, which sets free what was frozen by a call of `eval` while the model was built."""
    plain = lane_workload(MODELS["conv"])

    def build() -> nn.Module:
        model = plain.build_model()
        return model.apply(lambda m: m.eval() if isinstance(m, nn.BatchNorm2d) else m)

    workload = plain.replace(build_model=build, config=plain.config.replace(total_steps=6))
    with open_session(
        workload, stem="x", settings={}, trainer=Trainer(gradients="loop"), out=tmp_path / "s"
    ) as session:
        facts = collect_batch_norm(session)
    assert (facts["layers"], facts["unused"], len(facts["ema"])) == (1, 0, 1)
    assert facts["ema"][0]["batches"] == facts["step"] > 0


def test_a_study_of_a_model_without_batch_norm_says_so(tmp_path: Path) -> None:
    workload = lane_workload(MODELS["mlp"])
    with open_session(workload, stem="x", settings={}, trainer=Trainer(), out=tmp_path / "s") as session:
        assert collect_batch_norm(session) == {"layers": 0}
        assert not len(session.record.trials), "nothing is trained for it"


def test_a_loader_is_read_no_further_than_asked() -> None:
    read = []

    def endless() -> Any:
        for i in itertools.count():
            read.append(i)
            yield loader(1)[0]

    audit_batch_norm(warmed(), endless(), max_batches=4)
    assert len(read) == 4
