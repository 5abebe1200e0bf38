"""`check_evaluation` on evaluation functions as people write them, each with one planted fault (P2.11)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from tests.helpers.workloads import small_workload
from workbench.errors import DataError, UnknownNameError, UsageError, WorkloadError
from workbench.topics.evaluation.check import check_evaluation, collect_own_evaluation
from workbench.topics.evaluation.diagnose import diagnose_evaluation_cases
from workbench.train.distributed.data_parallel import evaluate_shard, join_shards
from workbench.train.evaluation import evaluate
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification

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


HEALTHY: dict[str, Evaluate] = {
    "right": right,
    "masked zeros": padded(False, True),
    "masked copies": padded(True, True),
}
FAULTS: dict[str, tuple[Evaluate, str, str]] = {
    "batch means": (batch_means, "weighting", "mean of batch means"),
    "padding of zeros": (padded(False, False), "weighting", "counted padding"),
    "padding of copies": (padded(True, False), "weighting", "counted padding"),
    "drop_last": (drops_last, "coverage", "rows seen"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_right_function_is_left_alone(name: str) -> None:
    found = check_evaluation(HEALTHY[name], workload_of())
    assert [f.status for f in found] == ["ok", "ok"], found


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_with_its_bias(name: str) -> None:
    function, code, fault = FAULTS[name]
    found = check_evaluation(function, workload_of())
    other = {"weighting": "coverage", "coverage": "weighting"}[code]
    assert (found[f"evaluation.{code}"].status, found[f"evaluation.{other}"].status) == ("fail", "ok"), found
    for case in found[f"evaluation.{code}"].evidence["cases"]:
        healthy = case["batch_size"] in (1, 103)
        assert case["fault"] == ("exact" if healthy else fault) or case["batch_size"] == 128, case
        if case["error"] is None:
            assert case["bias"] == pytest.approx(case["predicted_bias"], abs=1e-4)
            assert healthy or case["batch_size"] == 128 or abs(case["bias"]) > 1e-3


def test_a_sampler_that_pads_is_found_on_as_many_hosts_as_it_takes() -> None:
    found = check_evaluation(sampled, workload_of(), hosts=(1, 2, 4))
    assert found["evaluation.weighting"].status == "ok"
    coverage = found["evaluation.coverage"]
    assert coverage.status == "fail"
    assert {case["hosts"]: case["repeated"] for case in coverage.evidence["cases"]} == {1: 0, 2: 1, 4: 1}
    assert "hosts" in coverage.summary


def ours_on_hosts(workload: Workload) -> Evaluate:
    def evaluated(model: Any, data: Any, batch_size: int, hosts: int) -> float:
        given = workload.replace(validation_data=data)
        parts = [evaluate_shard(given, model, shard, hosts, batch_size=batch_size) for shard in range(hosts)]
        return join_shards(parts)[0].value

    return evaluated


def test_our_own_evaluation_passes_its_own_check_on_1_2_and_4_hosts() -> None:
    workload = workload_of()
    found = check_evaluation(ours_on_hosts(workload), workload, hosts=(1, 2, 4))
    assert [f.status for f in found] == ["ok", "ok"], found
    assert len(found["evaluation.coverage"].evidence["cases"]) == 12


def test_weights_count_and_ignoring_them_is_found() -> None:
    workload = workload_of(weights=lambda batch: batch[1].abs())

    def weighted(model: Any, data: Any, batch_size: int) -> float:
        return evaluate(workload.replace(validation_data=data), model, batch_size=batch_size)[0].value

    assert [f.status for f in check_evaluation(weighted, workload)] == ["ok", "ok"]
    found = check_evaluation(right, workload)["evaluation.weighting"]
    assert found.evidence["cases"][0]["fault"] == "weights ignored"


def test_a_model_that_looks_at_the_batch_is_found_without_a_function() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0))

    healthy = diagnose_evaluation_cases(collect_own_evaluation(workload_of(), CPU))
    assert [f.status for f in healthy] == ["ok", "ok"]
    sick = diagnose_evaluation_cases(collect_own_evaluation(workload_of(build_model=Centred), CPU))
    assert sick["evaluation.weighting"].status == "fail"
    assert "differs by" in sick["evaluation.weighting"].summary


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
        (lambda n, b: torch.ones(2, 2), r"several values \(shape \(2, 2\)\)"),
        ({"lost": 1.0}, r"mapping without 'loss'.*Did you mean 'lost'"),
        ("good", r"returned str \(good\), but must return one number"),
        (None, r"returned nothing, but must return one number"),
    ],
)
def test_what_is_no_metric_is_refused(value: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        check_evaluation(returns(value), workload_of(), batch_sizes=(10,))


def test_nan_of_a_function_that_calls_nothing_is_no_batch_that_was_not_full() -> None:
    with pytest.raises(WorkloadError, match="returned nan, though the loss of each example is finite"):
        check_evaluation(lambda model, data, batch_size: float("nan"), workload_of())


@pytest.mark.parametrize("examples", [20, 50, 60, 100])
def test_a_split_that_its_batch_size_divides_hides_no_mean_of_batch_means(examples: int) -> None:
    found = check_evaluation(batch_means, workload_of(examples))["evaluation.weighting"]
    assert found.status == "fail"
    assert "Mean of batch means" in found.summary
    assert check_evaluation(right, workload_of(examples)).verdict == "ok"


def test_another_metric_of_the_workload_is_recognised() -> None:
    def close(model: Any, data: Any, batch_size: int) -> float:
        hits = [((model(x).squeeze(-1) - y).abs() < 0.5).double() for x, y in DataLoader(data, batch_size=batch_size)]
        return float(torch.cat(hits).mean())

    with pytest.raises(UsageError, match="that is the workload's close, and its loss is .* metric='close'"):
        check_evaluation(close, workload_of())
    assert check_evaluation(close, workload_of(), metric="close").verdict == "ok"


def test_a_loss_that_is_averaged_and_expanded_again_is_named() -> None:
    def expanded(outputs: Tensor, batch: Any) -> Tensor:
        return ((outputs.squeeze(-1) - batch[1]) ** 2).mean().expand(len(batch[1]))

    found = check_evaluation(right, workload_of(loss=expanded))["evaluation.weighting"]
    assert found.status == "fail"
    assert "all examples of a batch have the same" in found.summary
    assert found.advice == ["Return the loss of each example: no mean over the batch, expanded or not."]


def test_an_error_of_the_function_is_told_with_the_call() -> None:
    def broken(model: Any, data: Any, batch_size: int) -> float:
        raise KeyError("mask")

    with pytest.raises(WorkloadError, match=r"103 examples, batch_size=10\) raised KeyError: 'mask'"):
        check_evaluation(broken, workload_of(), batch_sizes=(10,))


def test_a_set_smaller_than_a_batch_is_fine_and_an_empty_one_an_error() -> None:
    assert [f.status for f in check_evaluation(right, workload_of(5), batch_sizes=(10,))] == ["ok", "ok"]
    found = check_evaluation(drops_last, workload_of(5), batch_sizes=(10,))["evaluation.coverage"]
    assert "5 of 5 examples are never evaluated at batch size 10 (it raised ZeroDivisionError" in found.summary
    with pytest.raises(DataError, match="0 examples"):
        check_evaluation(right, workload_of(0))


def test_an_example_without_a_finite_value_is_named() -> None:
    workload = workload_of(20)
    workload.validation_data.tensors[1][7] = float("nan")
    with pytest.raises(WorkloadError, match="the loss of example 7 of the validation split is nan"):
        check_evaluation(right, workload)


def test_arguments_out_of_range_are_refused() -> None:
    workload = workload_of(10)
    with pytest.raises(UnknownNameError, match="no metric 'los'"):
        check_evaluation(right, workload, metric="los")
    with pytest.raises(UsageError, match="no argument named hosts"):
        check_evaluation(right, workload, hosts=(2,))
    with pytest.raises(UsageError, match="batch_sizes"):
        check_evaluation(right, workload, batch_sizes=(0,))
    with pytest.raises(UsageError, match="must be a function"):
        check_evaluation(3, workload)  # type: ignore[arg-type]


def test_a_metric_and_a_function_that_never_calls_the_model() -> None:
    workload = workload_of()
    found = check_evaluation(lambda model, data, batch_size: 0.5, workload, metric="close", batch_sizes=(10,))
    assert found["evaluation.coverage"].status == "not_measured"
    assert found["evaluation.weighting"].status == "fail"


def test_model_and_random_state_are_left_as_they_were() -> None:
    workload = workload_of()
    model = workload.build_model().train()
    state = torch.get_rng_state()
    check_evaluation(right, workload, model=model)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert not model._forward_pre_hooks


def test_items_that_are_drawn_anew_are_no_fault_of_the_evaluation() -> None:
    class Jittered(Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            return torch.randn(3), torch.tensor(float(index))

    found = diagnose_evaluation_cases(collect_own_evaluation(workload_of().replace(validation_data=Jittered()), CPU))
    assert [f.status for f in found] == ["ok", "ok"], found


def test_tensors_of_the_chosen_examples_are_theirs() -> None:
    def by_tensors(model: Any, data: Any, batch_size: int) -> float:
        x, y = data.tensors
        assert len(x) == 103
        return float(
            torch.cat(
                [losses(model, *two) for two in zip(x.split(batch_size), y.split(batch_size), strict=True)]
            ).mean()
        )

    assert [f.status for f in check_evaluation(by_tensors, workload_of())] == ["ok", "ok"]


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


def of_texts(data: Any, batch_size: int, collate: Any, **options: Any) -> Any:
    return DataLoader(data, batch_size=batch_size, collate_fn=collate, **options)


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

    def dropping(model: Any, data: Any, batch_size: int) -> float:
        batches = of_texts(data, batch_size, collate, drop_last=True)
        return float(torch.cat([F.cross_entropy(model(x), y, reduction="none") for x, y in batches]).mean())

    own = diagnose_evaluation_cases(collect_own_evaluation(workload, CPU))
    assert [f.status for f in own] == ["ok", "ok"], own
    assert [f.status for f in check_evaluation(summed, workload)] == ["ok", "ok"]
    found = check_evaluation(means, workload)
    assert (found["evaluation.weighting"].status, found["evaluation.coverage"].status) == ("fail", "ok"), found
    assert {case["fault"] for case in found["evaluation.weighting"].evidence["cases"]} == {
        "exact",
        "mean of batch means",
    }
    found = check_evaluation(dropping, workload, batch_sizes=(10,))
    coverage = found["evaluation.coverage"]
    assert (found["evaluation.weighting"].status, coverage.status) == ("ok", "fail"), found
    assert "3 of 103 examples are never evaluated" in coverage.summary


def test_padding_that_the_model_does_not_mask_is_found() -> None:
    sick = diagnose_evaluation_cases(collect_own_evaluation(texts(build_model=lambda: MeanOfTokens(masked=False)), CPU))
    assert sick["evaluation.weighting"].status == "fail"
    assert "differs by" in sick["evaluation.weighting"].summary


class ZeroHead(nn.Linear):
    """Gives every example one value as long as its weights are those it began with."""

    def __init__(self, *, centred: bool) -> None:
        super().__init__(3, 1)
        nn.init.zeros_(self.weight)
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0) if self.centred else x)


@pytest.mark.parametrize(("centred", "status"), [(False, "ok"), (True, "fail")])
def test_a_head_that_begins_at_zero_is_looked_at_with_other_weights(centred: bool, status: str) -> None:
    ones = TensorDataset(workload_of().validation_data.tensors[0], torch.ones(120))
    workload = workload_of(build_model=lambda: ZeroHead(centred=centred)).replace(validation_data=ones)
    found = diagnose_evaluation_cases(collect_own_evaluation(workload, CPU))
    assert found["evaluation.weighting"].status == status, found


def prepared(kind: str) -> Evaluate:
    """An evaluation that prepares its inputs in its own way: the model never sees a row of the workload's."""

    def evaluated(model: Any, data: Any, batch_size: int) -> float:
        loader = DataLoader(data, batch_size=batch_size, drop_last=kind == "drop_last")
        each = [losses(model, x * 1.0000001, y) for x, y in loader]
        if kind == "batch means":
            return float(torch.stack([one.mean() for one in each]).mean())
        return float(torch.cat(each).mean()) + 0.3 * (kind == "unexplained")

    return evaluated


@pytest.mark.parametrize(
    ("kind", "weighting", "coverage"),
    [
        ("healthy", "ok", "ok"),
        ("batch means", "fail", "ok"),
        ("drop_last", "ok", "fail"),
        ("unexplained", "fail", "not_measured"),
    ],
)
def test_inputs_that_nobody_recognises_are_taken_in_the_order_of_the_data(
    kind: str, weighting: str, coverage: str
) -> None:
    found = check_evaluation(prepared(kind), workload_of(), batch_sizes=(10, 4))
    assert found["evaluation.weighting"].status == weighting, found
    assert found["evaluation.coverage"].status == coverage, found
    assert all(case["by_order"] for case in found["evaluation.coverage"].evidence["cases"])
    if kind == "batch means":
        assert {c["fault"] for c in found["evaluation.weighting"].evidence["cases"]} == {"mean of batch means"}
    if kind == "drop_last":
        assert "3 of 103 examples are never evaluated" in found["evaluation.coverage"].summary


def test_where_nothing_can_be_seen_the_reason_is_named() -> None:
    broken = workload_of(20)
    broken.validation_data.tensors[1][7] = float("inf")
    with pytest.raises(WorkloadError, match="is inf"):
        collect_own_evaluation(broken, CPU)


def test_bfloat16_rounds_and_is_no_fault() -> None:
    workload = workload_of()
    workload = workload.replace(config=workload.config.replace(precision="bfloat16"))
    found = diagnose_evaluation_cases(collect_own_evaluation(workload, CPU))
    assert [f.status for f in found] == ["ok", "ok"], found


def test_examples_of_weight_zero_are_not_asked_for() -> None:
    workload = workload_of(weights=lambda batch: (batch[1] > 1).float())
    facts = collect_own_evaluation(workload, CPU)
    assert min(facts["weights"]) == 1
