"""`wb.evaluation.check` on evaluation functions as people write them, and the verdicts on cases made by hand (P2.11)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import workbench as wb
from tests.helpers.workloads import Having, small_workload
from workbench.errors import DataError, UsageError, WorkloadError
from workbench.topics.evaluation.check import collect_own_evaluation
from workbench.topics.evaluation.diagnose import diagnose_evaluation_cases
from workbench.train.distributed.data_parallel import evaluate_shard, join_shards
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification

VALUES = np.linspace(5.0, 1.0, 7)


def batches_of(size: int, count: int = 7) -> list[list[int]]:
    return [list(range(i, min(i + size, count))) for i in range(0, count, size)]


def facts(*cases: tuple[int, float | None, list[list[int]]], values: Any = VALUES, **more: Any) -> dict[str, Any]:
    return {
        "metric": "loss", "values": list(values), "weights": [1.0] * len(values), "batch_dependence": 0.0,
        "observed_batches": True,
        "cases": [{"batch_size": b, "hosts": 1, "observed": o, "batches": s, "error": None} for b, o, s in cases],
    } | more  # fmt: skip


def test_rows_that_are_no_examples_are_padding_whose_value_one_case_tells_the_other() -> None:
    pad = 0.7
    one = (VALUES.sum() + 2 * pad) / 9, [[0, 1, 2], [3, 4, 5], [6, -1, -1]]
    other = (VALUES.sum() + 3 * pad) / 10, [[*range(5)], [5, 6, -1, -1, -1]]
    found = diagnose_evaluation_cases(facts((3, *one), (5, *other)))["evaluation.weighting"]
    assert found.status == "fail"
    for case in found.evidence["cases"]:
        assert case["fault"] == "counted padding"
        assert case["predicted_bias"] == pytest.approx(case["bias"], rel=1e-9)


def test_padding_that_is_worth_what_the_last_batch_is_worth_is_still_padding() -> None:
    """In batches of 3 it gives what a mean of batch means gives; those of 4 tell the two apart."""
    pad, falling = 1.0, np.arange(7.0, 0.0, -1.0)
    padded = (
        (3, (28 + 2 * pad) / 9, [[0, 1, 2], [3, 4, 5], [6, -1, -1]]),
        (4, (28 + pad) / 8, [[0, 1, 2, 3], [4, 5, 6, -1]]),
    )
    found = diagnose_evaluation_cases(facts(*padded, values=falling))["evaluation.weighting"]
    assert [case["fault"] for case in found.evidence["cases"]] == ["counted padding"] * 2
    means = (3, (6 + 3 + 1) / 3, padded[0][2]), (4, (5.5 + 2) / 2, padded[1][2])
    found = diagnose_evaluation_cases(facts(*means, values=falling))["evaluation.weighting"]
    assert [case["fault"] for case in found.evidence["cases"]] == ["mean of batch means"] * 2


def unknown(observed: float, *batches: list[int]) -> dict[str, Any]:
    given = facts((3, observed, list(batches)))
    given["cases"][0]["by_order"] = True
    return given


MEANS = float(np.mean([VALUES[:3].mean(), VALUES[3:6].mean(), VALUES[6]]))  # of batches of 3, 3 and 1
SPREAD = float(np.ptp(VALUES))
RIGHT = (3, VALUES.mean(), batches_of(3))
WEIGHTS = [1.0, 1.0, 1.0, 2.0, 0.0, 3.0, 1.0]
WEIGHED = float(np.mean([VALUES[:3].mean(), np.average(VALUES[3:6], weights=WEIGHTS[3:6]), VALUES[6]]))
REPEATED = (4, VALUES[[*range(7), 0]].mean(), [[0, 2, 4, 6], [1, 3, 5, 0]])
TWICE = [(b, VALUES.mean() + 0.4, [row + [-1] * len(row) for row in batches_of(b)]) for b in (2, 3, 7)]


@pytest.mark.parametrize(
    ("given", "weighting", "coverage", "fault", "counts"),
    [
        (facts(*((b, VALUES.mean(), batches_of(b)) for b in (1, 3, 7, 9))), "ok", "ok", "exact", (0, 0, 0)),
        (facts((3, MEANS, batches_of(3))), "fail", "ok", "mean of batch means", (0, 0, 0)),
        (facts((3, WEIGHED, batches_of(3)), weights=WEIGHTS), "fail", "ok", "mean of batch means", (0, 0, 0)),
        (facts((3, VALUES.mean(), batches_of(3)), weights=WEIGHTS), "fail", "ok", "weights ignored", (0, 0, 0)),
        (facts((3, VALUES[:6].mean(), batches_of(3)[:2])), "ok", "fail", "rows seen", (1, 0, 0)),
        (facts(REPEATED), "ok", "fail", "rows seen", (0, 1, 0)),
        (facts((4, VALUES[[*range(7), 6]].mean(), [[0, 1, 2, 3], [4, 5, 6, 6]])), "fail", "ok", "counted padding", (0, 0, 1)),
        (facts((3, VALUES.mean(), [[0, 1, 2], [3, 4, 5], [6, -1, -1]])), "ok", "ok", "exact", (0, 0, 2)),
        (facts(*TWICE), "fail", "ok", "unexplained", (0, 0, 7)),  # one number for unknown rows would explain any value
        (facts((3, 1.0, batches_of(3)), values=[1.0] * 7), "not_measured", "ok", "exact", (0, 0, 0)),
        (facts((3, 2.345, batches_of(3))), "fail", "ok", "unexplained", (0, 0, 0)),
        (facts((9, None, []), RIGHT), "ok", "fail", "rows seen", (7, 0, 0)),
        (facts((3, VALUES.mean(), []), observed_batches=False), "ok", "not_measured", "exact", None),
        (facts(RIGHT, random=1.0), "ok", "ok", "exact", (0, 0, 0)),
        (facts((3, 9.0, batches_of(3)), coupled=True), "ok", "ok", "unexplained", (0, 0, 0)),
        (facts((3, VALUES.mean(), [[0, 1, -1], [3, 4, -1], [6]])), "ok", "ok", "exact", (0, 0, 0)),  # in another form
        (facts((3, VALUES[1:6].mean(), [[1, 2, 3], [4, 5, -1]])), "ok", "fail", "exact", (2, 0, 1)),  # by chance
        (facts((3, 9.9, [[0, 1, -1], [3, 4, -1], [6]])), "fail", "not_measured", "unexplained", (2, 0, 2)),
        (unknown(9.9, [0, 1, 2], [3, 4, 5], [6]), "fail", "not_measured", "unexplained", (0, 0, 0)),
        (unknown(VALUES[:6].mean(), [0, 1, 2], [3, 4, 5]), "ok", "fail", "rows seen", (1, 0, 0)),
        (facts(RIGHT, batch_dependence=0.02 * SPREAD), "fail", "ok", "exact", (0, 0, 0)),
        (facts(RIGHT, batch_dependence=0.005 * SPREAD), "ok", "ok", "exact", (0, 0, 0)),
        (facts((3, VALUES.mean() + 1e-3, batches_of(3))), "fail", "ok", "unexplained", (0, 0, 0)),
        (facts((3, VALUES.mean() + 1e-3, batches_of(3)), short_digits=True), "ok", "ok", "exact", (0, 0, 0)),
    ],
)  # fmt: skip
def test_what_a_case_says(given: Any, weighting: str, coverage: str, fault: str, counts: Any) -> None:
    found = diagnose_evaluation_cases(given)
    assert [f.status for f in found] == [weighting, coverage], found
    case = found["evaluation.weighting"].evidence["cases"][0]
    assert case["fault"] == fault
    assert counts is None or (case["dropped"], case["repeated"], case["padding"]) == counts
    if fault not in ("unexplained", "exact") and case["error"] is None and case["observed"] == case["observed"]:
        assert case["predicted_bias"] == pytest.approx(case["bias"])
        assert found["evaluation.weighting"].value == pytest.approx(abs(case["bias"])) or coverage == "fail"
    assert [f.status for f in diagnose_evaluation_cases({})] == ["not_measured"] * 2


Evaluate = Callable[..., Any]
CPU = torch.device("cpu")


def workload_of(examples: int = 120, **fields: Any) -> Workload:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 3, generator=generator)
    y = torch.randn(examples, generator=generator) * torch.linspace(0.1, 5, examples)
    return small_workload(validation_data=TensorDataset(x, y), config={"precision": None}, **fields)


def losses(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).squeeze(-1), y, reduction="none")


def right(model: Any, data: Any, batch_size: int) -> float:
    return sum(float(losses(model, x, y).sum()) for x, y in DataLoader(data, batch_size=batch_size)) / len(data)


def batch_means(model: Any, data: Any, batch_size: int) -> float:
    loader = DataLoader(data, batch_size=batch_size)
    return sum(float(losses(model, x, y).mean()) for x, y in loader) / len(loader)


def drops_last(model: Any, data: Any, batch_size: int) -> float:
    total, count = 0.0, 0
    for x, y in DataLoader(data, batch_size=batch_size, drop_last=True):
        total, count = total + float(losses(model, x, y).sum()), count + len(y)
    return total / count


def padded(copies: bool, masked: bool) -> Evaluate:
    def evaluated(model: Any, data: Any, batch_size: int) -> float:
        total, count = 0.0, 0.0
        for x, y in DataLoader(data, batch_size=batch_size):
            missing = batch_size - len(y)
            fill_x = x[-1:].expand(missing, -1) if copies else x.new_zeros(missing, x.shape[1])
            fill_y = y[-1:].expand(missing) if copies else y.new_zeros(missing)
            mask = torch.ones(batch_size)
            if masked:
                mask[len(y) :] = 0
            total += float((mask * losses(model, torch.cat([x, fill_x]), torch.cat([y, fill_y]))).sum())
            count += float(mask.sum())
        return total / count

    return evaluated


def sampled(model: Any, data: Any, batch_size: int, hosts: int) -> dict[str, float]:
    total, count = 0.0, 0
    for rank in range(hosts):
        sampler: Any = DistributedSampler(data, hosts, rank, shuffle=False)
        for x, y in DataLoader(data, batch_size=batch_size, sampler=sampler):
            total, count = total + float(losses(model, x, y).sum()), count + len(y)
    return {"loss": total / count, "other": 0.0}


FAULTS: dict[str, tuple[Evaluate, str, str]] = {
    "right": (right, "", "exact"),
    "masked zeros": (padded(False, True), "", "exact"),
    "masked copies": (padded(True, True), "", "exact"),
    "batch means": (batch_means, "weighting", "mean of batch means"),
    "padding of zeros": (padded(False, False), "weighting", "counted padding"),
    "padding of copies": (padded(True, False), "weighting", "counted padding"),
    "drop_last": (drops_last, "coverage", "rows seen"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_with_its_bias_and_a_right_function_left_alone(name: str) -> None:
    function, wrong, fault = FAULTS[name]
    workload = workload_of()
    model, state = workload.build_model().train(), torch.get_rng_state()
    found = wb.evaluation.check(function, workload, model=None if wrong else model)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert not model._forward_pre_hooks
    for code in ("weighting", "coverage"):
        assert found[f"evaluation.{code}"].status == ("fail" if code == wrong else "ok"), found
    for case in found[f"evaluation.{wrong}"].evidence["cases"] if wrong else ():
        healthy = case["batch_size"] in (1, 103)
        assert case["fault"] == ("exact" if healthy else fault) or case["batch_size"] == 128, case
        if case["error"] is None:
            assert case["bias"] == pytest.approx(case["predicted_bias"], abs=1e-4)
            assert healthy or case["batch_size"] == 128 or abs(case["bias"]) > 1e-3


def test_our_own_evaluation_passes_its_own_check_on_1_2_and_4_hosts() -> None:
    workload = workload_of()

    def evaluated(model: Any, data: Any, batch_size: int, hosts: int) -> float:
        given = workload.replace(validation_data=data)
        parts = [evaluate_shard(given, model, shard, hosts, batch_size=batch_size) for shard in range(hosts)]
        return join_shards(parts)[0].value

    found = wb.evaluation.check(evaluated, workload, hosts=(1, 2, 4))
    assert [f.status for f in found] == ["ok", "ok"], found
    assert len(found["evaluation.coverage"].evidence["cases"]) == 12
    found = wb.evaluation.check(sampled, workload, hosts=(1, 2, 4))
    assert [f.status for f in found] == ["ok", "fail"], "a sampler that pads"
    cases = found["evaluation.coverage"].evidence["cases"]
    assert {case["hosts"]: case["repeated"] for case in cases} == {1: 0, 2: 1, 4: 1}


def test_a_model_that_looks_at_the_batch_is_found_without_a_function() -> None:
    def centred() -> nn.Module:
        return Having(lambda m, x: m.layer(x - x.mean(0)), layer=nn.Linear(3, 1))

    healthy = diagnose_evaluation_cases(collect_own_evaluation(workload_of(), CPU))
    assert [f.status for f in healthy] == ["ok", "ok"]
    sick = diagnose_evaluation_cases(collect_own_evaluation(workload_of(build_model=centred), CPU))
    assert sick["evaluation.weighting"].status == "fail"


def returns(value: Any) -> Evaluate:
    def evaluated(model: Any, data: Any, batch_size: int) -> Any:
        for x, _ in DataLoader(data, batch_size=batch_size):
            model(x)
        return value(len(data), batch_size) if callable(value) else value

    return evaluated


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), r"batch_size=10\) returned nan, though the loss of each example is finite"),
        (lambda n, b: torch.ones(-(-n // b)), r"one value per batch \(shape \(11,\)\)"),
        (lambda n, b: [0.0] * n, r"one value per example \(shape \(103,\)\)"),
        ("good", r"returned str \(good\), but must return one number"),
        (None, r"returned nothing, but must return one number"),
    ],
)
def test_what_is_no_metric_is_refused(value: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        wb.evaluation.check(returns(value), workload_of(), batch_sizes=(10,))


def test_another_metric_of_the_workload_is_recognised() -> None:
    def close(model: Any, data: Any, batch_size: int) -> float:
        hits = [((model(x).squeeze(-1) - y).abs() < 0.5).double() for x, y in DataLoader(data, batch_size=batch_size)]
        return float(torch.cat(hits).mean())

    with pytest.raises(UsageError, match="that is the workload's close, and its loss is .* metric='close'"):
        wb.evaluation.check(close, workload_of())
    assert wb.evaluation.check(close, workload_of(), metric="close").verdict == "ok"


def test_what_the_check_cannot_use_is_refused() -> None:
    bad = workload_of(20)
    bad.validation_data.tensors[1][7] = float("nan")
    for said, given, options in (
        ("the loss of example 7 of the validation split is nan", bad, {}),
        ("no metric 'los'", workload_of(10), {"metric": "los"}),
        ("no argument named hosts", workload_of(10), {"hosts": (2,)}),
        ("batch_sizes", workload_of(10), {"batch_sizes": (0,)}),
    ):
        with pytest.raises((UsageError, WorkloadError), match=said):
            wb.evaluation.check(right, given, **options)
    small = wb.evaluation.check(drops_last, workload_of(5), batch_sizes=(10,))["evaluation.coverage"]
    assert "5 of 5 examples are never evaluated at batch size 10 (it raised ZeroDivisionError" in small.summary
    with pytest.raises(DataError, match="0 examples"):
        wb.evaluation.check(right, workload_of(0))
    with pytest.raises(WorkloadError, match=r"103 examples, batch_size=10\) raised ZeroDivisionError"):
        wb.evaluation.check(lambda model, data, batch_size: 1 / 0, workload_of(), batch_sizes=(10,))


class Texts(Dataset[Any]):
    """Token rows of 3 to 20, each padded to the longest of its batch."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(2)
        sizes = torch.randint(3, 20, (count,), generator=generator).tolist()
        self.items = [(torch.randint(1, 50, (n,), generator=generator), k % 3) for k, n in enumerate(sizes)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def padded_texts(items: Any, *, left: bool = False) -> Any:
    rows = [x.flip(0) if left else x for x, _ in items]
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return x.flip(1) if left else x, torch.tensor([y for _, y in items])


class MeanOfTokens(nn.Module):
    def __init__(self, masked: bool = True) -> None:
        super().__init__()
        self.masked, self.embed, self.head = masked, nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float().unsqueeze(-1) if self.masked else torch.ones(*x.shape, 1)
        return self.head((self.embed(x) * mask).sum(1) / mask.sum(1))


def texts(collate: Any = padded_texts, **fields: Any) -> Workload:
    config = small_workload(config={"precision": None}).config
    fields = {"build_model": MeanOfTokens, "validation_data": Texts(120)} | fields
    return classification(name="texts", train_data=Texts(30), collate=collate, config=config, **fields)


def of_texts(data: Any, batch_size: int, collate: Any) -> Any:
    return DataLoader(data, batch_size=batch_size, collate_fn=collate)


@pytest.mark.parametrize("left", [False, True])
def test_rows_that_are_padded_to_the_longest_of_their_batch_are_known(left: bool) -> None:
    collate = functools.partial(padded_texts, left=left)
    workload = texts(collate)

    def summed(model: Any, data: Any, batch_size: int) -> float:
        batches = of_texts(data, batch_size, collate)
        return sum(float(F.cross_entropy(model(x), y, reduction="sum")) for x, y in batches) / len(data)

    def means(model: Any, data: Any, batch_size: int) -> float:
        batches = of_texts(data, batch_size, collate)
        return sum(float(F.cross_entropy(model(x), y)) for x, y in batches) / len(batches)

    own = diagnose_evaluation_cases(collect_own_evaluation(workload, CPU))
    assert [f.status for f in own] == ["ok", "ok"], own
    assert [f.status for f in wb.evaluation.check(summed, workload)] == ["ok", "ok"]
    found = wb.evaluation.check(means, workload)
    assert (found["evaluation.weighting"].status, found["evaluation.coverage"].status) == ("fail", "ok"), found
    sick = diagnose_evaluation_cases(collect_own_evaluation(texts(build_model=lambda: MeanOfTokens(masked=False)), CPU))
    assert sick["evaluation.weighting"].status == "fail", "padding that the model does not mask"
