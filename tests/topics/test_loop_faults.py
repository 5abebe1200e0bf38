"""What `wb.watch` must never do: end a training, keep what was trained, leave torch changed, or take one optimizer's numbers for another's."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from workbench.instruments.norms import stacked
from workbench.instruments.observer import LoopObserver
from workbench.instruments.rows import kept
from workbench.instruments.taps import TAPS
from workbench.programs.change import Change, Stopped


def update(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    F.cross_entropy(model(torch.ones(4, 3)), torch.tensor([0, 1, 1, 0])).backward()
    for optimizer in optimizers:
        optimizer.step()


def test_nothing_holds_the_model_and_the_optimizer_after_a_watch(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        update(model, optimizer)
    alive = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer, run
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert TAPS.on_fault == {}


def test_a_training_that_turns_non_finite_is_divergent_and_its_updates_are_not_missing(tmp_path: Path) -> None:
    """The square root of a distance of 0 has no finite gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for update in range(60):
            x = torch.randn(8, 3)
            other = x if update == 12 else torch.randn(8, 3)
            optimizer.zero_grad()
            (model(x) - model(other)).square().sum(1).sqrt().mean().backward()
            optimizer.step()
    found = run.diagnose()
    assert found["loop.no_update"].status == "ok"
    assert next(iter(found.findings)).code == "stability.divergent"


@pytest.mark.parametrize("place", ["before the pass", "after the step"])
def test_norms_are_those_of_the_update_where_a_loop_clips_other_gradients(place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(12):
            if place == "after the step" and norms:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.zero_grad()
            if place == "before the pass":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            F.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0])).backward()
            norms.append(math.hypot(*(p.grad.norm().item() for p in model.parameters() if p.grad is not None)))
            optimizer.step()
    steps = run.record.steps
    looked = steps["looked"] == 1
    assert looked.sum() >= 8
    assert steps["grad_norm"][looked].tolist() == pytest.approx(
        [n for n, seen in zip(norms, looked, strict=True) if seen], rel=1e-5
    )


@pytest.mark.parametrize("constants", [{}, {"betas": None, "weight_decay": None}, {"eps": -1.0}, {"lr": None}])
def test_an_optimizer_whose_constants_are_odd_is_watched_to_the_end(constants: dict[str, Any], tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(3):
            update(model, optimizer)
            optimizer.param_groups[0].update(constants)
            if constants:
                break
    assert len(run.record.steps) == (1 if constants else 3)
    assert '"state": "complete"' in (run.path / "trials" / "0" / "events.jsonl").read_text()


@pytest.mark.stops_recording
def test_a_fault_while_closing_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), wb.watch(model, optimizer, out=tmp_path / "run") as run:
        update(model, optimizer)
        monkeypatch.setattr(run._observer.facts, "to_dict", lambda: 1 / 0)
    assert [record.getMessage().count("stopped recording") for record in caplog.records] == [1]
    assert TAPS.listeners == []
    with pytest.raises(wb.errors.UsageError):
        run.__enter__()


def test_loss_functions_are_the_original_ones_after_two_watches_that_end_in_any_order(tmp_path: Path) -> None:
    original = F.cross_entropy
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watches = [wb.watch(model, optimizer, out=tmp_path / name) for name in ("first", "second")]
    with watches[0], watches[1]:
        first, second = (watch._undo_criteria for watch in watches)
        update(model, optimizer)
        first()
        assert F.cross_entropy is not original
        second()
        first()
        assert F.cross_entropy is original
    assert F.cross_entropy is original


def pair() -> tuple[list[nn.Linear], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    return models, [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]


def loss_of(model: nn.Module, factor: float) -> Tensor:
    return factor * F.cross_entropy(model(torch.ones(4, 3)), torch.tensor([0, 1, 1, 0]))


@pytest.mark.parametrize("shared", [False, True])
def test_an_optimizer_that_is_not_watched_leaves_its_loss_and_norm_to_nobody(shared: bool, tmp_path: Path) -> None:
    (made, judge), (rule, other) = pair()
    losses, norms = [], []
    with wb.watch(made, rule, out=tmp_path / "run") as run:
        for _ in range(4):
            if not shared:
                other.zero_grad()
                loss_of(judge, 7.0).backward()
                nn.utils.clip_grad_norm_(judge.parameters(), 0.5)
                other.step()
            rule.zero_grad()
            loss = loss_of(made, 1.0) + (loss_of(judge, 7.0) if shared else 0.0)
            loss.backward()
            losses.append(loss.item())
            norms.append(float(nn.utils.get_total_norm([p.grad for p in made.parameters()])))
            if shared:
                other.step()
            rule.step()
    assert run.record.steps["loss"].tolist() == losses
    assert run.record.steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)


def test_two_optimizers_that_are_clipped_before_both_step_have_each_its_own_norm(tmp_path: Path) -> None:
    models, rules = pair()
    norms: list[list[float]] = [[], []]
    with wb.watch(models, rules, out=tmp_path / "run") as run:
        for _ in range(4):
            for model, rule, factor in zip(models, rules, (1.0, 7.0), strict=True):
                rule.zero_grad()
                loss_of(model, factor).backward()
            for model, seen in zip(models, norms, strict=True):
                seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            for rule in rules:
                rule.step()
    steps = run.record.steps
    assert steps["grad_norm"].tolist() == pytest.approx(norms[0])
    after = steps["grad_norm/optimizer1"].tolist()[1:]  # a row ends with the step of the first optimizer
    assert after == pytest.approx(norms[1][:-1])


def fused(max_norm: float | None, *, scaled: bool) -> tuple[list[float], list[float], Tensor]:
    """Return gradient norms and whether each update was clipped, of Adam that unscales by itself, and the weights."""
    (model, _), _ = pair()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
    rows: list[Any] = []
    change = Change(max_grad_norm=max_norm)
    observer = LoopObserver(rows.append, intervention=change)
    TAPS.add(observer)
    try:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    finally:
        TAPS.remove(observer)
    observer.rows.flush()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return rows[0]["grad_norm"], rows[0].get("clipped", []), weights


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_an_optimizer_that_unscales_by_itself_gives_true_norms_and_is_clipped_at_them(max_norm: float | None) -> None:
    plain, scaled = fused(max_norm, scaled=False), fused(max_norm, scaled=True)
    assert scaled[0] == pytest.approx(plain[0], rel=1e-5)
    assert scaled[1] == plain[1]
    assert set(plain[1]) == (set() if max_norm is None else {1.0})
    assert torch.allclose(scaled[2], plain[2], atol=1e-6)


@pytest.mark.parametrize("where", ["step_begins", "clipped", "step_ends", "updated", "drew"])
def test_a_fault_of_the_observer_leaves_the_intervention_as_it_was(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(*, broken: bool) -> tuple[Tensor, int, list[Exception]]:
        (model, _), (optimizer, _) = pair()
        told: list[Exception] = []
        observer = LoopObserver(lambda _: None, intervention=Change(factor=0.5, max_grad_norm=0.05, stop_after=6))
        TAPS.add(observer, told.append)
        if broken:
            monkeypatch.setattr(observer.facts, where, lambda *_, **__: 1 / 0)
        try:
            with contextlib.suppress(Stopped):
                for (inputs,) in DataLoader(TensorDataset(torch.ones(40, 3)), 4):
                    optimizer.zero_grad()
                    model(inputs).square().mean().backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
        finally:
            TAPS.remove(observer)
        assert optimizer.param_groups[0]["lr"] == 0.1
        return nn.utils.parameters_to_vector(model.parameters()).detach(), observer.updates, told

    whole, broken = trained(broken=False), trained(broken=True)
    assert torch.equal(whole[0], broken[0])
    assert (whole[1], broken[1]) == (6, 6)
    assert [type(error) for error in broken[2]] == [ZeroDivisionError]
    assert whole[2] == []


def test_losses_and_norms_of_several_devices_are_put_together_on_the_first() -> None:
    both = stacked([torch.ones((), device="meta"), torch.ones(1)])
    assert (both.device.type, both.shape) == ("meta", (2,))


def test_a_learning_rate_that_is_missing_is_no_number() -> None:
    assert math.isnan(float(kept(None)))


@pytest.mark.parametrize("frozen", [True, False])
def test_losses_that_are_run_backward_before_either_optimizer_steps_go_to_what_they_reach(
    frozen: bool, tmp_path: Path
) -> None:
    """Of a GAN's two losses each is its own optimizer's, from the first update on; a loss that reaches both counts for both."""
    (made, judge), (rule, critic) = pair()
    own: list[list[float]] = [[], []]
    with wb.watch([judge, made], [critic, rule], out=tmp_path / "run") as run:
        for k in range(5):
            critic.zero_grad()
            rule.zero_grad()
            first = loss_of(judge, 1.0 + k)
            first.backward()
            judge.requires_grad_(not frozen)
            second = F.cross_entropy(judge(F.pad(made(torch.ones(4, 3)), (0, 1))), torch.tensor([0, 1, 1, 0]))
            second.backward()
            judge.requires_grad_(True)
            critic.step()
            rule.step()
            own[0].append(first.item() + (0.0 if frozen else second.item()))
            own[1].append(second.item())
    steps = run.record.steps
    assert steps["loss"].tolist() == pytest.approx(own[0], rel=1e-6)
    assert steps["loss/optimizer1"].tolist()[1:] == pytest.approx(own[1][:-1], rel=1e-6)  # in the row that ends next


@pytest.mark.parametrize("watched", [0, 1])
def test_of_two_such_losses_an_optimizer_that_is_watched_alone_has_its_own(watched: int, tmp_path: Path) -> None:
    models, rules = pair()
    losses = []
    with wb.watch(models[watched], rules[watched], out=tmp_path / "run") as run:
        for k in range(5):
            both = [loss_of(model, factor + k) for model, factor in zip(models, (1.0, 7.0), strict=True)]
            for rule, loss in zip(rules, both, strict=True):
                rule.zero_grad()
                loss.backward()
            for rule in rules:
                rule.step()
            losses.append(both[watched].item())
    assert run.record.steps["loss"].tolist() == losses


def test_a_graph_that_grows_from_update_to_update_is_told_with_its_line(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer, state = torch.optim.SGD(model.parameters(), lr=0.01), torch.zeros(())
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(40):
            optimizer.zero_grad()
            state = 0.5 * state + model(torch.ones(2, 3)).mean()
            state.square().backward(retain_graph=True)
            optimizer.step()
    finding = run.diagnose()["loop.retained_graph"]
    assert finding.status == "fail"
    assert finding.value is not None
    assert finding.value > 3
    assert "test_loop_faults.py:" in finding.summary


def test_the_least_loss_of_probabilities_that_are_taken_for_logits_is_the_one_that_is_told(tmp_path: Path) -> None:
    """One-hot probabilities on the right class are the best there are: what torch says of them is the bound."""
    for name, classes in (("cross_entropy", 7), ("binary_cross_entropy_with_logits", 1)):
        model = nn.Sequential(nn.Linear(3, classes), nn.Softmax(1) if classes > 1 else nn.Sigmoid())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        target = torch.tensor([0, 3]) if classes > 1 else torch.ones(2, 1)
        with wb.watch(model, optimizer, out=tmp_path / name) as run:
            for _ in range(6):
                optimizer.zero_grad()
                getattr(F, name)(model(torch.randn(2, 3)), target).backward()
                optimizer.step()
        best = F.one_hot(target, classes).float() if classes > 1 else target
        assert run.diagnose()["loss.double_softmax"].value == pytest.approx(
            getattr(F, name)(best, target).item(), rel=1e-5
        )


def test_logits_of_places_whose_view_mixes_them_with_classes_are_told(tmp_path: Path) -> None:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 5)

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.movedim(1, -1).reshape(-1, 5)

    for view, status in ((first, "fail"), (moved, "ok")):
        model = nn.Conv2d(3, 5, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with wb.watch(model, optimizer, out=tmp_path / status) as run:
            for _ in range(6):
                optimizer.zero_grad()
                F.cross_entropy(view(model(torch.randn(2, 3, 4, 6))), torch.randint(5, (48,))).backward()
                optimizer.step()
        found = run.diagnose()["loss.broadcast"]
        assert found.status == status, found.summary
        assert status == "ok" or "(2, 5, 4, 6) are viewed as (48, 5) (tests" in found.summary


def test_logits_that_are_averaged_over_all_places_and_flattened_rouse_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for examples in (0, 2, 2, 2, 2, 2):
            optimizer.zero_grad()
            F.cross_entropy(
                model(torch.randn(examples, 3, 4, 6)), torch.randint(5, (examples,)), reduction="sum"
            ).backward()
            optimizer.step()
    assert run.diagnose()["loss.broadcast"].status == "ok"


@pytest.mark.parametrize("name", ["mse_loss", "cross_entropy"])
def test_a_first_batch_without_examples_stops_no_recording(name: str, tmp_path: Path) -> None:
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for examples in (0, *[32] * 20):
            x, y = torch.randn(examples, 8), torch.randint(5, (examples,))
            optimizer.zero_grad()
            getattr(F, name)(model(x), y if name == "cross_entropy" else x[:, :5], reduction="sum").backward()
            optimizer.step()
    found = run.diagnose()
    assert found["loop.no_step"].status == "ok", "it is seen to the end"
    assert "could not be determined" not in found["data.scale"].summary


@pytest.mark.parametrize("swapped", [False, True])
def test_outputs_that_are_given_as_targets_are_told(swapped: bool, tmp_path: Path) -> None:
    model, targets = nn.Linear(3, 4), torch.eye(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(6):
            optimizer.zero_grad()
            outputs = model(torch.randn(4, 3))
            (F.cross_entropy(targets, outputs.softmax(1)) if swapped else F.cross_entropy(outputs, targets)).backward()
            optimizer.step()
    found = run.diagnose()["loss.double_softmax"]
    assert (found.status, "in the place of outputs" in found.summary) == (("fail", True) if swapped else ("ok", False))


@pytest.mark.parametrize("product", ["ik,jk->ij", "matmul"])
def test_cosines_that_are_multiplied_by_a_temperature_cannot_reach_their_targets(product: str, tmp_path: Path) -> None:
    """Of 64 candidates, with the right cosine 1 and the others -1: log(1 + 63 exp(-2 scale)), of log 64."""
    for scale, status in ((0.1, "fail"), (1.0, "ok"), (10.0, "ok")):
        model = nn.Linear(8, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with wb.watch(model, optimizer, out=tmp_path / f"{scale}") as run:
            for _ in range(6):
                a, b = (F.normalize(model(torch.randn(64, 8)), dim=1) for _ in range(2))
                cosines = a @ b.T if product == "matmul" else torch.einsum(product, a, b)
                optimizer.zero_grad()
                F.cross_entropy(cosines * scale, torch.arange(64)).backward()
                optimizer.step()
        found = run.diagnose()["loss.output_range"]
        assert found.status == status, found.summary
        assert found.value == pytest.approx(math.log1p(63 * math.exp(-2 * scale)) / math.log(64), abs=0.01)


@pytest.mark.parametrize("shape", [(8, 5), (8, 6, 5), (8, 5, 3, 3)], ids=["rows", "tokens", "pixels"])
def test_a_divergence_from_soft_targets_takes_logarithms(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Of a teacher's and of smoothed labels; what a distribution runs over stands last, or, of pixels, second."""
    axis, classes = (1, 3) if len(shape) == 4 else (-1, 5)
    for given, status in ((torch.log_softmax, "ok"), (torch.softmax, "fail")):
        model = nn.Linear(shape[-1], shape[-1])
        teacher = torch.randn(shape).softmax(axis)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with wb.watch(model, optimizer, out=tmp_path / status) as run:
            for k in range(6):
                soft = teacher if k % 2 else 0.9 * (teacher == teacher.amax(axis, keepdim=True)) + 0.1 / classes
                optimizer.zero_grad()
                F.kl_div(given(model(torch.randn(shape)), axis), soft, reduction="batchmean").backward()
                optimizer.step()
        found = run.diagnose()["loss.double_softmax"]
        assert found.status == status, found.summary
        assert (
            status == "ok" or "kl_div takes logarithms of probabilities and gets probabilities (tests" in found.summary
        )


@pytest.mark.parametrize("shape", [(2, 1), (2,)])
def test_logits_of_a_layer_that_lie_between_0_and_1_so_far_are_no_probabilities(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """As those of a discriminator in its first updates; the twin ends in a sigmoid."""
    for last, status in ((nn.Identity(), "ok"), (nn.Sigmoid(), "fail")):
        model = nn.Sequential(nn.Linear(3, 1), last)
        nn.init.uniform_(model[0].weight, -0.01, 0.01), nn.init.constant_(model[0].bias, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        with wb.watch(model, optimizer, out=tmp_path / status) as run:
            for _ in range(6):
                optimizer.zero_grad()
                logits = model(torch.randn(2, 3)).view(shape)
                F.binary_cross_entropy_with_logits(logits, torch.ones(shape)).backward()
                optimizer.step()
        assert run.diagnose()["loss.double_softmax"].status == status


@pytest.mark.stops_recording
def test_training_goes_on_where_the_folder_of_a_watch_vanishes_which_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model, _), (optimizer, _) = pair()
    with caplog.at_level(logging.WARNING), wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for k in range(300):
            if k == 120:
                shutil.rmtree(run.path)
            update(model, optimizer)
            if k % 50 == 0:
                run.log(validation_loss=0.5)
    assert [record.getMessage().count("stopped recording") for record in caplog.records] == [1]
    assert TAPS.listeners == []
    assert not (tmp_path / "run").exists() or not (tmp_path / "run" / "study.json").exists()


def test_what_cannot_be_asked_or_compared_is_left_alone(tmp_path: Path) -> None:
    """A loader that refuses to be changed, tensors that have no version, and a loss that is a scaled parameter."""

    class Fixed(DataLoader):  # type: ignore[type-arg]
        def __setattr__(self, name: str, value: Any) -> None:
            if name in ("collate_fn", "worker_init_fn") and name in self.__dict__:
                raise AttributeError(name)
            super().__setattr__(name, value)

    with torch.inference_mode():
        table = torch.ones(200, 200, dtype=torch.float64)
    w = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([w], lr=0.01)
    with wb.watch(nn.ParameterList([w]), optimizer, out=tmp_path / "run") as run:
        for batch in Fixed(list(range(12)), 2, num_workers=1):
            table.float()
            optimizer.zero_grad()
            (w * 2.0 * float(batch[0])).backward()
            optimizer.step()
    assert run.record.steps["loss"].tolist()[0] == 0.0
    assert len(run.record.steps) == 6
    assert run.diagnose()["data.worker_rng"].status == "ok"


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_workers_that_are_no_forks_are_asked_too(start: str, tmp_path: Path) -> None:
    w = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([w], lr=0.01)
    loader = DataLoader(_Noise(), 2, num_workers=2, multiprocessing_context=start, worker_init_fn=_alike)
    with wb.watch(nn.ParameterList([w]), optimizer, out=tmp_path / "run") as run:
        for batch in loader:
            optimizer.zero_grad()
            (w * batch.sum()).backward()
            optimizer.step()
    finding = run.diagnose()["data.worker_rng"]
    assert (finding.status, "2 worker processes draw the same random numbers from torch" in finding.summary) == (
        "warn",
        True,
    )


class _Noise(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, _: int) -> Tensor:
        return torch.rand(3)


def _alike(_: int) -> None:
    torch.manual_seed(0)
