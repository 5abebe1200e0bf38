"""The contract that every bundled workload keeps."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from workbench.config import TrainConfig
from workbench.workloads.base import Workload
from workbench.workloads.checks import (
    check_data,
    check_fresh,
    check_loss_shape,
    check_model,
    check_selection,
    scan_targets,
)
from workbench.workloads.registry import list_workloads, load_workload

NAMES = tuple(list_workloads())
CLASSES = {"digits_mlp": 10, "digits_cnn": 10, "digits_resnet": 10, "digits_resnet_stride1": 10, "breast_cancer": 2}
CHANCE = {**CLASSES, "source_text": 256}


def build(workload: Workload, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return workload.build_model()


def batch_of(workload: Workload, split: str = "train", size: int = 8) -> object:
    data = workload.data(split)
    items = [data[i] for i in range(min(size, len(data)))]
    return (workload.collate or default_collate)(items)


@pytest.fixture(params=NAMES)
def workload(request: pytest.FixtureRequest) -> Workload:
    return load_workload(request.param)


def test_its_name_is_the_name_it_was_loaded_by() -> None:
    assert [load_workload(name).name for name in NAMES] == list(NAMES)


def test_model_is_a_function_of_the_seed(workload: Workload) -> None:
    first, again, other = (build(workload, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_checks_pass(workload: Workload) -> None:
    sizes = check_data(workload, workload.config)
    assert sizes == {split: len(data) for split, data in workload.splits.items()}
    check_model(build(workload))
    check_fresh(build(workload), build(workload))
    check_selection(workload, workload.config)


def test_loss_weights_and_metrics_are_per_example(workload: Workload) -> None:
    for split, data in workload.splits.items():
        batch = batch_of(workload, split)
        outputs = workload.forward(build(workload), batch)
        examples = min(8, len(data))
        check_loss_shape(workload.loss(outputs, batch), examples)
        for metric in workload.metrics.values():
            values = metric(outputs, batch)
            check_loss_shape(values, examples)
            assert bool(((values >= 0) & (values <= 1)).all())


def test_an_example_does_not_see_the_others_in_evaluation(workload: Workload) -> None:
    model = build(workload).eval()
    size = min(8, len(workload.train_data))
    whole, single = batch_of(workload, size=size), batch_of(workload, size=1)
    with torch.no_grad():
        together = workload.loss(workload.forward(model, whole), whole)[:1]
        alone = workload.loss(workload.forward(model, single), single)
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)


def test_every_parameter_gets_a_gradient(workload: Workload) -> None:
    model = build(workload)
    batch = batch_of(workload)
    workload.loss(workload.forward(model, batch), batch).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_curvature_along_the_gradient_is_the_slope_of_the_gradient(workload: Workload) -> None:
    """Hessian times vector, as sharpness needs it, against a finite difference of gradients in float64."""
    model = build(workload).double().eval()
    batch = [part.double() if part.is_floating_point() else part for part in batch_of(workload)]
    parameters = list(model.parameters())

    def gradient(**how: bool) -> list[Tensor]:
        loss = workload.loss(workload.forward(model, batch), batch).mean()
        return list(torch.autograd.grad(loss, parameters, **how))

    direction = [part.detach() for part in gradient()]
    exact = torch.autograd.grad(gradient(create_graph=True), parameters, direction, materialize_grads=True)
    sides = []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter, part in zip(parameters, direction, strict=True):
                parameter.add_(part, alpha=sign * 1e-6)
        sides.append(gradient())
    curvature = sum((h * d).sum() for h, d in zip(exact, direction, strict=True))
    slope = sum(((a - b) / 2e-6 * d).sum() for a, b, d in zip(*sides, direction, strict=True))
    torch.testing.assert_close(curvature, slope, rtol=1e-3, atol=1e-9)


def test_lanes_give_what_one_after_the_other_gives(workload: Workload) -> None:
    batch = batch_of(workload)
    models = [build(workload, seed) for seed in (0, 1)]
    expected = torch.stack([workload.loss(workload.forward(model, batch), batch) for model in models])
    models = [build(workload, seed) for seed in (0, 1)]  # the forward pass moved their batch-norm statistics

    def lane(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        def call(inputs: Tensor) -> Tensor:
            return torch.func.functional_call(models[0], (parameters, buffers), (inputs,))

        return workload.loss(workload.forward(call, batch), batch)

    together = torch.func.vmap(lane)(*torch.func.stack_module_state(models))
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CHANCE)
def test_initial_loss_is_near_chance(name: str) -> None:
    workload = load_workload(name)
    batch = batch_of(workload, size=128)
    loss = float(workload.loss(workload.forward(build(workload), batch), batch).mean().detach())
    assert loss == pytest.approx(math.log(CHANCE[name]), rel=0.15)


@pytest.mark.parametrize("name", CLASSES)
def test_every_split_has_every_class_in_the_same_share(name: str) -> None:
    workload = load_workload(name)
    shares = {}
    for split, data in workload.splits.items():
        counts = scan_targets(data, classes=CLASSES[name], split=split)
        shares[split] = [count / len(data) for count in counts]
    for split in ("validation", "test"):
        assert shares[split] == pytest.approx(shares["train"], abs=0.01)


@pytest.mark.parametrize("name", ["digits_mlp", "breast_cancer", "source_text"])
def test_no_example_is_in_two_splits(name: str) -> None:
    splits = load_workload(name).splits
    rows = {split: {item.numpy().tobytes() for item, _ in data} for split, data in splits.items()}
    if name == "source_text":  # some windows are blank or repeat a licence: a few bytes of text recur everywhere
        shared = len(rows["validation"] & rows["train"])
        assert shared <= 0.02 * len(rows["validation"])
    else:
        assert rows["train"].isdisjoint(rows["validation"] | rows["test"])
        assert rows["validation"].isdisjoint(rows["test"])


@pytest.mark.parametrize("name", CLASSES)
def test_inputs_are_standardised_float32(name: str) -> None:
    inputs: Tensor = load_workload(name).train_data.tensors[0]
    assert inputs.dtype == torch.float32
    assert float(inputs.mean()) == pytest.approx(0, abs=1e-3)
    assert float(inputs.std()) == pytest.approx(1, abs=1e-2)


def test_it_is_frozen(workload: Workload) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "steps"), [("digits_mlp", 2000), ("digits_cnn", 4000), ("source_text", 2000), ("breast_cancer", 1000)]
)
def test_config_is_a_baseline_of_the_stated_length(name: str, steps: int) -> None:
    config = load_workload(name).config
    assert isinstance(config, TrainConfig)
    assert config.total_steps == steps


@pytest.mark.parametrize(
    ("name", "accuracy"), [("digits_mlp", 0.9), ("digits_cnn", 0.9), ("digits_resnet", 0.9), ("breast_cancer", 0.93)]
)
def test_a_short_plain_loop_learns_it(name: str, accuracy: float) -> None:
    workload = load_workload(name)
    model, data = build(workload), workload.train_data.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.config.peak_lr, momentum=0.9)
    for _ in range(150):
        rows = torch.randint(len(data[0]), (workload.config.batch_size,))
        batch = [part[rows] for part in data]
        optimizer.zero_grad()
        workload.loss(workload.forward(model, batch), batch).mean().backward()
        optimizer.step()
    held_out = workload.validation_data.tensors
    with torch.no_grad():
        measured = workload.metrics["accuracy"](workload.forward(model.eval(), held_out), held_out).mean()
    assert float(measured) >= accuracy
