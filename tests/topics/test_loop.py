"""`wb.watch` and its findings, against training loops as people write them: healthy ones, and the same with one fault planted in their text."""

from __future__ import annotations

import contextlib
import importlib
import linecache
import math
import re
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import workbench as wb
from tests.helpers import leftovers
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis, read_diagnosis
from workbench.topics.loop.diagnose import CODES
from workbench.views.summary import study_sentence

LOOPS = Path(__file__).parents[1] / "own_loops"
EVERY = sorted(path.stem for path in LOOPS.glob("*.py") if path.stem != "__init__")
SLOW = ("averaged", "compiled", "ddp", "sharded")
OWN = ("loop.", "loss.", "units.", "gradients.", "init.", "clipping.", "data.")


class Fault(NamedTuple):
    """One fault: its finding, the loop, what is replaced by what in its text, and a piece of the line that the finding names."""

    code: str
    loop: str
    edits: tuple[tuple[str, str], ...]
    at: str = ""


def fault(code: str, loop: str, *edits: tuple[str, str], at: str = "") -> Any:
    return pytest.param(Fault(code, loop, edits, at), id=f"{code}-{loop}-{edits[0][1].strip()[:30] or 'removed'}")


GONE = ""
ZERO, BACK, STEP = "optimizer.zero_grad()\n", "loss.backward()\n", "optimizer.step()\n"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), "
FAULTS = [
    # gradients that are not zeroed
    fault("loop.no_zero_grad", "digits_mlp", (ZERO, "\n"), at=BACK),
    fault("loop.no_zero_grad", "nano_gpt", ("optimizer.zero_grad(set_to_none=True)", ""), at=BACK),
    fault("loop.no_zero_grad", "vae", (ZERO, "\n"), at=BACK),
    fault("loop.no_zero_grad", "dcgan", ("netG.zero_grad()", ""), at="errG.backward()"),
    # zeroed between backward and step
    fault("loop.zeroed_before_step", "digits_mlp", (STEP, ZERO.strip() + "; " + STEP), at="optimizer.zero_grad(); "),
    fault("loop.zeroed_before_step", "nano_gpt", (STEP, "model.zero_grad(); " + STEP), at="model.zero_grad(); "),
    fault("loop.zeroed_before_step", "digits_cnn", (ZERO, "\n"), (BACK, BACK.strip() + "; " + ZERO), at="loss.backward(); "),
    fault("loop.zeroed_before_step", "nano_gpt", (BACK, "optimizer.zero_grad(); loss.backward()\n"), ("optimizer.zero_grad(set_to_none=True)", ""), at="optimizer.zero_grad(); "),
    # never stepped, stepped twice
    fault("loop.no_step", "digits_mlp", (STEP, "\n"), at=BACK),
    fault("loop.no_step", "nano_gpt", (STEP, "\n"), at=BACK),
    fault("loop.no_step", "dcgan", ("optimizerG.step()", "")),
    fault("loop.repeated_step", "digits_cnn", (STEP, STEP.strip() + "; " + STEP), at="optimizer.step(); "),
    fault("loop.repeated_step", "rnn", (STEP, STEP.strip() + "; " + STEP), at="optimizer.step(); "),
    fault("loop.repeated_step", "vae", (STEP, STEP.strip() + "; " + STEP), at="optimizer.step(); "),
    # the optimizer of another model
    fault("loop.optimizer_mismatch", "digits_cnn", ("    criterion = nn.Cross", "    shown, net = net, Net()\n    criterion = nn.Cross"), ("SGD(net.", "SGD(shown.")),
    fault("loop.optimizer_mismatch", "nano_gpt", ("    history = []", "    history, model = [], GPT()")),
    fault("loop.optimizer_mismatch", "vae", ("    history = []", "    history, model = [], VAE()")),
    # part of the model without gradient, unknown to the optimizer, or never changed
    fault("loop.no_gradient", "digits_mlp", ("logits = model(inputs)", "logits = head(encoder(inputs).detach())")),
    # part of the model within no_grad or inference_mode
    fault("loop.no_grad_mode", "digits_cnn", ("        x = self.stem(x)\n", "        with torch.no_grad():\n            x = self.stem(x)\n"), at="self.stem(x)"),
    fault("loop.no_grad_mode", "digits_mlp", ("logits = model(inputs)", "with torch.no_grad(): hidden = encoder(inputs)\n                logits = head(hidden)"), at="encoder(inputs)"),
    fault("loop.no_grad_mode", "vae", ("h = F.relu(self.fc1(x))", "with torch.inference_mode(): h = self.fc1(x)\n        h = F.relu(h.clone())"), at="self.fc1(x)"),
    fault("loop.no_gradient", "digits_cnn", ("x = self.stem(x)\n", "x = self.stem(x).detach()\n")),
    # frozen as it was drawn, and inputs that are not scaled
    fault("loop.frozen_random", "digits_mlp", ("    optimizer =", "    encoder.requires_grad_(False)\n    optimizer =")),
    fault("loop.frozen_random", "rnn", ("    optimizer =", "    model.rnn.requires_grad_(False)\n    optimizer =")),
    fault("loop.frozen_random", "frozen_backbone", ("    nn.init.orthogonal_(model.backbone[0].weight)  # for weights that are loaded\n", "")),
    fault("data.scale", "digits_mlp", ("dtype=torch.float32) / 16", "dtype=torch.float32) * 16"), ("lr=0.1", "lr=0.001")),
    fault("data.scale", "frozen_backbone", ("x = torch.randn(512, 16)", "x = torch.randn(512, 16) * 10.0 ** torch.arange(-8, 8)"), ("nn.BatchNorm1d(24), ", "")),
    # graphs that are kept on purpose
    fault("loop.retained_graph", "vae", ("loss.backward()", "loss.backward(retain_graph=True)"), at="loss.backward("),
    fault("loop.retained_graph", "digits_mlp", (BACK, "loss.backward(retain_graph=True)\n"), at="loss.backward("),
    fault("loop.retained_graph", "rnn", (BACK, "torch.autograd.backward(loss, None, True)\n"), at="autograd.backward("),
    # workers that draw alike
    fault("data.worker_rng", "workers", ("np.random.seed(torch.initial_seed() % 2**32)", "np.random.seed(0)"), at="in loader"),
    fault("data.worker_rng", "workers", ("np.random.seed(torch.initial_seed() % 2**32)", "random.seed(worker_id)"), at="in loader"),
    fault("data.worker_rng", "workers", ("np.random.randn(8, 8).astype", "self.kept.standard_normal((8, 8)).astype"), at="in loader"),
    # conversions in every step
    fault("loop.conversion", "digits_mlp", ("        for epoch in", "        table = torch.randn(2000, 1000, dtype=torch.float64)\n        for epoch in"), ("(logits, targets)", "(logits, targets) + 1e-9 * table.float()[0, 0]"), at="table.float()"),
    fault("loop.conversion", "vae", ("    history = []\n", "    history, prior = [], torch.rand(1000, 1000)\n"), ("data, mu, logvar)\n                loss.b", "data, mu, logvar) * prior.double()[0].mean().sign()\n                loss.b"), at="prior.double()"),
    fault("loop.conversion", "digits_cnn", ("outputs = net(images)", "images = images.repeat(1, 1, 48, 48).double().float()[..., :8, :8]\n                outputs = net(images)"), at=".double()"),
    # losses with a floor
    fault("loss.floor", "digits_mlp", ("loss = F.cross_entropy(logits, targets)", "loss = F.cross_entropy(logits, targets).clamp(min=1.5)"), at="cross_entropy"),
    fault("loss.floor", "nano_gpt", ("loss = F.cross_entropy(", "loss = 0.25 + F.cross_entropy("), at="F.cross_entropy("),
    fault("loss.floor", "digits_cnn", ("                loss = criterion(outputs, labels)\n", "                loss = criterion(outputs, labels) + 0.5\n"), at="criterion("),
    fault("loop.no_gradient", "nano_gpt", ("x = x + self.c_proj(y)", "x = x + self.c_proj(y).data")),
    fault("loop.no_gradient", "dcgan", ("output = netD(fake).view(-1)", "output = netD(fake.detach()).view(-1)")),
    fault("loop.unowned_parameters", "nano_gpt", ("nn.ModuleList([Block(), Block()])", "[Block(), Block()]")),
    fault("loop.unowned_parameters", "digits_mlp", ("SGD(model.parameters()", "SGD(head.parameters()")),
    fault("loop.unowned_parameters", "digits_cnn", ("SGD(net.parameters()", "SGD(net.body.parameters()")),
    fault("loop.no_update", "nano_gpt", ('            for param_group in optimizer.param_groups:\n', '            for param_group in optimizer.param_groups[:1]:\n'),
          ('"weight_decay": 0.0}', '"weight_decay": 0.0, "lr": 0.0}')),
    fault("loop.no_update", "digits_mlp", (STEP, "encoder[0].weight.grad.mul_(0.0); " + STEP)),
    fault("loop.no_update", "vae", ("Adam(model.parameters(), lr=1e-3)", "Adam([{'params': p, 'lr': 0.0 if p.ndim == 1 else 1e-3} for p in model.parameters()])")),
    # modes
    fault("loop.eval_mode_in_training", "digits_mlp", ("model.train()\n", "model.eval()\n"), at=BACK),
    fault("loop.eval_mode_in_training", "digits_cnn", ("            net.train()\n", ""), at=BACK),
    fault("loop.eval_mode_in_training", "nano_gpt", ("        model.train()\n", ""), at=BACK),
    fault("loop.eval_mode_in_training", "rnn", ("            model.train()\n", ""), at=BACK),
    fault("loop.train_mode_in_eval", "digits_mlp", ("            model.eval()\n", ""), at="model(inputs)"),
    fault("loop.train_mode_in_eval", "digits_cnn", ("    net.eval()\n", ""), at="net(images)"),
    fault("loop.train_mode_in_eval", "nano_gpt", ("        model.eval()\n", ""), at="model("),
    fault("loop.train_mode_in_eval", "rnn", ("            model.eval()\n", ""), at="model(xb)"),
    # schedulers
    fault("loop.scheduler_unit", "digits_mlp", ("            scheduler.step()\n", ""), (STEP, STEP.strip() + "; scheduler.step()\n"), at="scheduler.step()"),
    fault("loop.scheduler_unit", "digits_cnn", ("            scheduler.step()\n", ""), (STEP, STEP.strip() + "; scheduler.step()\n"), at="scheduler.step()"),
    fault("loop.scheduler_unit", "vae", ("    history = []\n", "    history, scheduler = [], optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])\n"),
          (STEP, STEP.strip() + "; scheduler.step()\n"), at="scheduler.step()"),
    fault("loop.scheduler_unit", "rnn", ("                scheduler.step()\n", ""), ("            model.eval()\n", "            model.eval(); scheduler.step()\n"), at="scheduler.step()"),
    fault("loop.scheduler_unit", "digits_mlp", ("StepLR(optimizer, step_size=2, gamma=0.5)", "CosineAnnealingLR(optimizer, T_max=6 * len(loader))"), at="scheduler.step()"),
    fault("loop.scheduler_unit", "vae", ("    history = []\n", "    history, scheduler = [], optim.lr_scheduler.PolynomialLR(optimizer, 60)\n"),
          ("            model.eval()\n", "            model.eval(); scheduler.step()\n"), at="scheduler.step()"),
    fault("loop.scheduler_unit", "checkpointed", ("CosineAnnealingWarmRestarts(optimizer, T_0=20)", "CosineAnnealingLR(optimizer, T_max=40)"), at="scheduler.step()"),
    fault("loop.scheduler_unit", "digits_cnn", ("T_max=EPOCHS", "T_max=EPOCHS - 2"), at="scheduler.step()"),
    fault("loop.scheduler_unit", "vae", ("    history = []\n", "    history, scheduler = [], optim.lr_scheduler.PolynomialLR(optimizer, 40)\n"),
          (STEP, STEP.strip() + "; scheduler.step()\n"), at="scheduler.step()"),
    *(
        fault("loop.scheduler_unit", "digits_cnn", ("EPOCHS = 5", "EPOCHS = 9"), ("CosineAnnealingLR(optimizer, T_max=EPOCHS)", f"ReduceLROnPlateau(optimizer, mode={mode!r}, patience=1)"),
              ("scheduler.step()", f"scheduler.step({metric})"), at=f"scheduler.step({metric})")
        for mode, metric in (("max", "val_loss"), ("min", "2.718 ** -val_loss"))
    ),
    fault("loop.scheduler_order", "checkpointed", ("            scheduler.step()\n", ""), (STEP, "scheduler.step(); " + STEP), at="scheduler.step()"),
    fault("loop.scheduler_order", "rnn", ("                scheduler.step()\n", ""), (ZERO, "scheduler.step(); " + ZERO), at="scheduler.step()"),
    fault("loop.scheduler_order", "digits_mlp", ("            scheduler.step()\n", ""), ("            model.train()\n", "            model.train(); scheduler.step()\n"), at="scheduler.step()"),
    # accumulation
    fault("loop.accumulation_scale", "nano_gpt", ("loss = loss / gradient_accumulation_steps", "pass"), at=BACK),
    fault("loop.accumulation_scale", "ddp", ("(loss / 2).backward()", "loss.backward()"), at=BACK),
    fault("loop.accumulation_scale", "compiled", (" / size", ""), at=BACK),
    fault("loop.accumulation_scale", "compiled", ("min(4, len(loader) - i // 4 * 4)", "4")),
    fault("loop.accumulation_scale", "ddp", ("last = i % 2 == 1", "last = i % 3 == 2 or i == 19"), ("loss / 2", "loss / 3")),
    fault("loop.accumulation_scale", "nano_gpt", ("range(gradient_accumulation_steps)", "range(1 if iter_num % 5 == 4 else 4)")),
    # clipping
    fault("clipping.before_unscale", "scaled", ("                scaler.unscale_(optimizer)\n", ""), at="clip_grad_norm_"),
    fault("clipping.before_unscale", "scaled", ("                scaler.unscale_(optimizer)\n", ""), ("scaler.step(optimizer)", "scaler.unscale_(optimizer); scaler.step(optimizer)"), at="clip_grad_norm_"),
    fault("clipping.before_unscale", "scaled", ("                scaler.unscale_(optimizer)\n", ""), ("clip_grad_norm_(model.parameters(), 5.0)", "clip_grad_value_(model.parameters(), 5.0)"), at="clip_grad_value_"),
    fault("clipping.before_unscale", "all_at_once", ("                        scaler.unscale_(optimizer)\n", "                        pass\n"), at="clip_grad_norm_"),
    fault("clipping.before_unscale", "digits_mlp", ("        for epoch in", "        scaler = torch.amp.GradScaler('cpu')\n        for epoch in"), (BACK, "scaler.scale(loss).backward()\n"),
          (STEP, f"{CLIP}1.0); scaler.step(optimizer); scaler.update()\n"), at="clip_grad_norm_"),
    fault("clipping.after_step", "rnn", (f"                {CLIP}max_norm=10.0)\n", ""), (STEP, STEP.strip() + f"; {CLIP}max_norm=10.0)\n"), at="clip_grad_norm_"),
    fault("clipping.after_step", "digits_mlp", (STEP, STEP.strip() + f"; {CLIP}1.0)\n"), at="clip_grad_norm_"),
    fault("clipping.after_step", "vae", (STEP, STEP.strip() + f"; {CLIP}1.0)\n"), at="clip_grad_norm_"),
    fault("clipping.aggressive", "rnn", ("max_norm=10.0", "max_norm=0.001")),
    fault("clipping.aggressive", "nano_gpt", ("5e-4, 5.0, 0.1", "5e-4, 0.01, 0.1")),
    fault("clipping.aggressive", "digits_mlp", (STEP, f"{CLIP}0.01); " + STEP)),
    # the same batch again
    fault("loop.repeated_batch", "digits_mlp", ("shuffle=True", "shuffle=False"), ("            for inputs, targets in loader:\n", "            for _ in range(10):\n                inputs, targets = next(iter(loader))\n"), at="iter(loader)"),
    fault("loop.repeated_batch", "digits_cnn", ("        for epoch in range(EPOCHS):\n", "        images, labels = next(iter(train_loader))\n        for epoch in range(EPOCHS):\n"),
          ("for images, labels in train_loader", "for _ in range(15)"), at="iter(train_loader)"),
    fault("loop.repeated_batch", "rnn", ("        for epoch in range(EPOCHS):\n", "        batch = next(iter(loader))\n        for epoch in range(EPOCHS):\n"),
          ("            for xb, yb in loader:\n", "            for _ in range(16):\n                xb, yb = batch\n"), at="iter(loader)"),
    # losses
    fault("loss.double_softmax", "digits_mlp", ("logits = model(inputs)", "logits = model(inputs).softmax(1)"), at="cross_entropy"),
    fault("loss.double_softmax", "digits_mlp", ("F.cross_entropy(logits", "F.nll_loss(logits.softmax(1)"), at="nll_loss"),
    fault("loss.double_softmax", "digits_cnn", ("self.head(x.mean((2, 3)))", "torch.softmax(self.head(x.mean((2, 3))), 1)"), at="criterion(outputs"),
    fault("loss.double_softmax", "nano_gpt", ("self.lm_head(self.ln_f(x))", "self.lm_head(self.ln_f(x)).softmax(-1)"), at="cross_entropy"),
    fault("loss.double_softmax", "sparse", ("criterion(model(users[pick], items[pick])", "criterion(model(users[pick], items[pick]).sigmoid()"), at="criterion("),
    fault("loss.broadcast", "rnn", ("prediction.squeeze(-1)", "prediction"), at="criterion("),
    fault("loss.broadcast", "checkpointed", ("mse_loss(prediction, y[pick])", "mse_loss(prediction, y[pick, 0])"), at="mse_loss"),
    fault("loss.broadcast", "ddp", ("mse_loss(model(inputs), targets)", "mse_loss(model(inputs)[:, 0], targets)"), at="mse_loss"),
    fault("loss.broadcast", "checkpointed", ("mse_loss(prediction, y[pick])", "huber_loss(prediction, y[pick, 0])"), at="huber_loss"),
    fault("loss.broadcast", "checkpointed", ("nn.functional.mse_loss(prediction, y[pick])", "((prediction - y[pick, 0]) ** 2).mean()"), at="prediction - y"),
    fault("loss.broadcast", "rnn", ("criterion(prediction.squeeze(-1), yb)", "(yb - prediction).abs().mean()"), at="yb - prediction"),
    # a loss that does not fall, or without end
    fault("lr.nothing_learns", "digits_mlp", ("lr=0.1", "lr=1e-7")),
    fault("loss.unbounded", "vae", ("-0.5 * torch.sum", "0.5 * torch.sum"), ("lr=1e-3", "lr=0.1")),
    # a KL term that is too heavy: every output is the mean one
    fault("init.constant_output", "vae", ("range(6)", "range(60)"), ("-0.5 * torch.sum", "-32 * torch.sum")),
    # dropout that drops nearly all, and gradients of which clipping leaves the signs
    fault("units.dropped", "digits_mlp", ("nn.Dropout(0.1)", "nn.Dropout(0.95)"), at="model(inputs)"),
    fault("clipping.aggressive", "digits_mlp", (STEP, "torch.nn.utils.clip_grad_value_(model.parameters(), 1e-6); " + STEP), at="clip_grad_value_"),
    # the model is shown what it has to predict
    fault("loop.sees_target", "nano_gpt", ("is_causal=True", "is_causal=False"), at="F.cross_entropy"),
    fault("loop.sees_target", "nano_gpt", ("y = F.scaled_dot_product_attention(q, k, v, is_causal=True)", "y = (q @ k.mT).tril().softmax(1) @ v"), at="F.cross_entropy"),
    fault("loop.sees_target", "nano_gpt", ("part[i + 1 : i + 1 + block_size]", "part[i : i + block_size]"), at="F.cross_entropy"),
    # sequences that are mixed
    fault("loss.broadcast", "nano_gpt", ("logits.view(-1, logits.size(-1))", "logits.transpose(0, 1).reshape(-1, logits.size(-1))"), at="F.cross_entropy"),
    fault("loop.batch_dependence", "nano_gpt", ("y = F.scaled_dot_product_attention(q, k, v, is_causal=True)", "y = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)"), at="F.cross_entropy"),
    # graphs that are kept
    fault("loop.memory_creep", "digits_mlp", ("total_loss += loss.item()", "total_loss += loss"), at=BACK),
    fault("loop.memory_creep", "rnn", ("total += loss.item()", "total += loss"), at=BACK),
    fault("loop.memory_creep", "nano_gpt", ("history.append(loss.item())", "history.append(logits)"), at=BACK),
    fault("loop.memory_creep", "checkpointed", ("history.append(loss.item())", "history.append(loss)"), at=BACK),
]  # fmt: skip


def planted(fault: Fault, folder: Path) -> types.ModuleType:
    """Return the module of a loop with a fault in its text; every replacement has to fit once."""
    text = (LOOPS / f"{fault.loop}.py").read_text()
    for old, new in fault.edits:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    path = folder / f"{fault.loop}_faulty.py"
    path.write_text(text)
    linecache.checkcache(str(path))
    module = types.ModuleType(path.stem)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def judged(train: Callable[..., list[float]], out: Path, seed: int = 0) -> Diagnosis:
    train(partial(wb.watch, out=out), seed)
    return wb.loop.judge(wb.open(out))


SEEDS = [
    pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.nightly] if seed else [], id=f"seed{seed}")
    for seed in range(3)
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_first_and_its_line_named(fault: Fault, seed: int, tmp_path: Path) -> None:
    module = planted(fault, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about some of the faults
        diagnosis = judged(module.train, tmp_path / "run", seed)
    finding = next(
        f for f in diagnosis if not seed or f.code.startswith((*OWN, "lr."))
    )  # noise of so few updates may look unstable
    assert (finding.code, finding.status in ("fail", "warn")) == (fault.code, True), diagnosis
    if fault.at:
        named = re.search(rf"\({fault.loop}_faulty\.py:(\d+)[;)]", finding.summary)
        assert named, finding.summary
        assert (
            fault.at.strip()
            in Path(module.__dict__.get("__file__") or tmp_path / f"{fault.loop}_faulty.py")
            .read_text()
            .splitlines()[int(named[1]) - 1]
        )


class _Nobody(nullcontext[Any]):
    """Stands where `wb.watch` stands, and does nothing."""

    def __enter__(self) -> _Nobody:
        return self

    def log(self, **_: float) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def _ports_that_torch_keeps() -> Iterator[None]:
    before = leftovers.ports()
    yield
    leftovers.KEPT |= leftovers.ports() - before


@pytest.fixture(scope="module", params=[pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in EVERY])
def healthy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[float], Path]:
    """A loop, its losses where nobody watched, and the record of a watched run of the same seed."""
    module = importlib.import_module(f"tests.own_loops.{request.param}")
    alone = module.train(lambda *_, **__: _Nobody(), 1)
    out = tmp_path_factory.mktemp(request.param) / "run"
    assert module.train(partial(wb.watch, out=out), 1) == alone  # to the last bit
    return module, alone, out


def test_a_healthy_loop_rouses_nothing(healthy: tuple[Any, list[float], Path]) -> None:
    module, _, out = healthy
    diagnosis = wb.loop.judge(wb.open(out))
    alarms = [f for f in diagnosis if f.status in ("fail", "warn") and f.code.startswith((*OWN, "stability.", "lr."))]
    assert alarms == [], diagnosis
    unknown = {f.code for f in diagnosis if f.status == "not_measured" and f.code.startswith(OWN)}
    units = {code for code in CODES if code.startswith(("units.", "gradients."))} - {"units.dropped"}
    rows = {"loop.batch_dependence"}  # that are asked of by a backward pass of the own code alone
    known = {
        "all_at_once": units | rows,  # what is computed again is no part of the graph
        "checkpointed": units | rows,
        "compiled": {"data.scale"} | rows,  # its layers are not called one by one
        "dcgan": {"data.no_signal", "init.loss"},  # neither of its two losses has to fall
        "sharded": units
        | rows
        | {"loop.no_update", "clipping.aggressive", "clipping.nonfinite"},  # no process has whole gradients
    }
    assert unknown == known.get(module.__name__.rpartition(".")[2], set())


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 2, 3, 4])
@pytest.mark.parametrize("name", EVERY)
def test_a_healthy_loop_rouses_nothing_whatever_its_seed(name: str, seed: int, tmp_path: Path) -> None:
    diagnosis = judged(importlib.import_module(f"tests.own_loops.{name}").train, tmp_path / "run", seed)
    assert [f for f in diagnosis if f.status in ("fail", "warn") and f.code.startswith(OWN)] == [], diagnosis


def test_the_record_has_the_losses_that_the_loop_saw(healthy: tuple[Any, list[float], Path]) -> None:
    module, alone, out = healthy
    rows = wb.open(out).steps["loss"].tolist()
    name = module.__name__.rpartition(".")[2]
    scale = {"vae": 64}.get(name, 1)  # what the loop notes is a mean of the batch
    if name in ("all_at_once", "nano_gpt", "compiled", "ddp", "scaled"):
        pytest.skip("several passes an update, or updates that are skipped: the test below has them in closed form")
    assert rows == pytest.approx([value * scale for value in alone], rel=1e-5)


SCALED: dict[str, tuple[str, Callable[[Any, list[Any]], list[Any]]]] = {
    "divided": ("2 1", lambda scaler, parts: [scaler.scale(part / 2) for part in parts]),
    "divided after scaling": ("2 1", lambda scaler, parts: [scaler.scale(part) / 2 for part in parts]),
    "averaged after scaling": (
        "2 1",
        lambda scaler, parts: [scaler.scale(part.expand(3)).mean() / 2 for part in parts],
    ),
    "one sum": ("", lambda scaler, parts: [sum(scaler.scale(list(parts))) / 2]),
}


@pytest.mark.parametrize("form", SCALED)
def test_a_scaled_loss_of_several_passes_is_recorded_as_its_mean_and_its_gradient_unscaled(
    form: str, tmp_path: Path
) -> None:
    """Of (w - c)^2 for the targets of one update the mean is known, and so is its slope."""
    factor, made = SCALED[form]
    w = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(w.weight)
    optimizer, scaler = torch.optim.SGD(w.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1000.0)
    targets, at, losses, norms = [(1.0, 3.0), (2.0, 4.0), (0.0, 5.0)], 0.0, [], []
    with wb.watch(w, optimizer, out=tmp_path / "run") as watched:
        for pair in targets:
            losses.append(sum((at - c) ** 2 for c in pair) / 2)
            norms.append(abs(sum(2 * (at - c) for c in pair) / 2))
            at -= 0.1 * sum(2 * (at - c) for c in pair) / 2
            optimizer.zero_grad()
            for loss in made(scaler, [(w(torch.ones(1, 1)) - c).square().mean() for c in pair]):
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
    steps = wb.open(tmp_path / "run").steps
    order = wb.open(watched.path).facts["loop"]["order"]
    known = order["optimizers"]["0"]["factors"]
    assert not factor or known == {factor: len(targets)}, "halves of a mean, whatever the scale"
    assert steps["loss"].tolist() == pytest.approx(losses, rel=1e-5)
    assert steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)


def _patched() -> dict[str, Any]:
    """Return what a watch replaces, as it is now."""
    owners = {
        "autograd": torch.autograd, "utils": torch.nn.utils, "functional": torch.nn.functional, "module": torch.nn.Module,
        "optimizer": torch.optim.Optimizer, "scaler": torch.amp.GradScaler, "loader": torch.utils.data.DataLoader,
        **{name: kind for name, kind in vars(torch.optim.lr_scheduler).items() if isinstance(kind, type)},
    }  # fmt: skip
    return {f"{owner}.{name}": value for owner, held in owners.items() for name, value in vars(held).items()}


def test_nothing_is_left_behind_and_twice_is_once(tmp_path: Path) -> None:
    before = _patched()
    model, inside = torch.nn.Linear(3, 1), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()

    with wb.watch(model, optimizer, out=tmp_path / "outer"):
        once = _patched()
        with wb.watch(model, optimizer, out=tmp_path / "inner"):
            inside = _patched()
            for _ in range(6):
                update()
        update()
        with contextlib.suppress(ZeroDivisionError), wb.watch(model, optimizer, out=tmp_path / "broken"):
            update()
            raise ZeroDivisionError
    assert {name for name in once if once[name] is not before.get(name)} >= {"autograd.backward", "optimizer.zero_grad"}
    assert {n for n in once if inside[n] is not once[n]} <= {
        n for n in once if n.startswith(("functional.", "Tensor."))
    }
    after = _patched()
    assert [name for name in before if after[name] is not before[name]] == []
    imported = {name for name, value in after.items() if isinstance(value, types.ModuleType)}  # by torch, on first use
    assert set(after) - imported == set(before) - imported
    assert not model._forward_pre_hooks
    assert [len(wb.open(tmp_path / name).steps) for name in ("outer", "inner", "broken")] == [8, 6, 1]
    assert wb.open(tmp_path / "broken").trials["state"].tolist() == ["failed"]
    said = study_sentence(wb.open(tmp_path / "broken"))
    assert "in an error: ZeroDivisionError: no message (test_loop.py, line " in said
    assert "resumes" not in said


def test_a_warning_of_torch_names_the_line_of_the_loop(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        shown = warnings.showwarning
        with wb.watch(model, optimizer, out=tmp_path / "run"):
            torch.nn.functional.mse_loss(model(torch.ones(2, 3)), torch.ones(2)).backward()
            optimizer.step()
        assert warnings.showwarning is shown

    with pytest.warns(UserWarning, match="target size") as told:
        train()
    assert {warning.filename for warning in told if "target size" in str(warning.message)} == {__file__}


def _fitted(out: Path, losses: Iterator[float], count: int, **options: Any) -> Diagnosis:
    """Train one number by `count` updates whose losses are given."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=out, **options) as run:
        for _ in range(count):
            optimizer.zero_grad()
            (model(torch.ones(4, 1)).mean() * next(losses)).backward()
            optimizer.step()
    diagnosis = run.diagnose()
    assert [f.to_dict() for f in read_diagnosis(out)] == [f.to_dict() for f in diagnosis]
    assert wb.loop.judge(wb.open(out)).rows() == diagnosis.rows()
    return diagnosis


def test_losses_that_are_nan_or_constant_and_runs_that_are_too_short(tmp_path: Path) -> None:
    gone = _fitted(tmp_path / "nan", iter([1.0] * 20 + [float("nan")] * 20), 40)
    assert (gone["stability.divergent"].status, gone["loop.no_zero_grad"].status) == ("fail", "ok")
    assert wb.open(tmp_path / "nan").trials["state"].tolist() == ["diverged"]
    flat = _fitted(tmp_path / "zero", iter([0.0] * 40), 40)
    assert [f.code for f in flat if f.status == "fail" and f.code.startswith(OWN)] == ["loop.no_update"]
    short = _fitted(tmp_path / "short", iter([1.0] * 3), 3)
    assert {f.status for f in short if f.code.startswith("loop.no_z")} == {"not_measured"}
    assert "it takes 5 updates" in short["loop.no_zero_grad"].summary
    nothing = _fitted(tmp_path / "none", iter([]), 0)
    assert {f.status for f in nothing if f.code.startswith(OWN)} == {"not_measured"}


@pytest.mark.parametrize(("status", "loss"), [
    ("warn", lambda t: math.exp(-t / 10)), ("warn", lambda t: 2.0 - 0.3 * t), ("warn", lambda t: 2.0 - 0.5 * t * t),  # lengths of the run
    ("ok", lambda t: math.exp(-4 * t)), ("ok", lambda t: 1.0 - 0.9 * t), ("ok", lambda t: 1.0 + math.exp(-8 * t)), ("ok", lambda t: 1.0 + 0.1 * t),
])  # fmt: skip
def test_a_loss_that_does_not_slow_down_tells_of_a_learning_rate_that_is_too_low(status: str, loss: Callable[[float], float], tmp_path: Path) -> None:  # fmt: skip
    """Noise of 1 % of the loss; a run of fewer than 150 updates tells nothing."""
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0)).mul(0.01).exp().tolist()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for count, told in ((400, status), (100, "ok")):
        with wb.watch(model, optimizer, out=tmp_path / str(count)) as run:
            for k in range(count):
                optimizer.zero_grad()
                model(torch.ones(4, 1)).square().mean().backward()
                run.log(loss=loss(k / count) * noise[k])
                optimizer.step()
        finding = run.diagnose()["lr.too_low"]
        assert finding.status == told, finding.summary


def test_a_policy_gradient_is_not_judged_by_its_loss(tmp_path: Path) -> None:
    train = importlib.import_module("tests.own_loops.reinforce").train
    assert judged(train, tmp_path / "told")["stability.early_recovers"].summary.startswith("Does not apply")


def test_a_run_can_be_judged_while_it_trains_and_logs_what_it_is_given(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run", name="mine", steps=60) as run:
        for step in range(30):
            loss = model(torch.randn(8, 2)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                run.log(validation_loss=0.5, accuracy=0.25, note="a text", many=torch.ones(3))
        assert run.diagnose()["loop.no_zero_grad"].status == "ok"
    evals = wb.open(tmp_path / "run").evals
    assert evals["step"].tolist() == [10, 10, 20, 20, 30, 30]  # updates made before
    assert evals.groupby(["split", "metric"])["value"].first().to_dict() == {
        ("validation", "accuracy"): 0.25,
        ("validation", "loss"): 0.5,
    }


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(
        UsageError, match=r"watch\(optimizer=...\) needs a torch Optimizer, or several in a list; given: Linear"
    ):
        wb.watch(model, model)  # type: ignore[arg-type]
    run = wb.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), out=tmp_path / "run")
    with pytest.raises(UsageError, match="nothing was recorded yet"):
        run.diagnose()
    with run, pytest.raises(UsageError, match="used already"):
        run.__enter__()


@pytest.mark.parametrize(("mode", "values", "status"), [
    ("max", [2.0, 1.5, 1.2, 1.0, 0.9, 0.8, 0.7, 0.6], "fail"), ("min", [2.0, 1.5, 1.2, 1.0, 0.9, 0.8, 0.7, 0.6], "ok"),
    ("min", [0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.82, 0.84], "warn"), ("max", [0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.82, 0.84], "ok"),
    ("min", [0.9, 0.7, 0.6, 0.62, 0.66, 0.7, 0.74, 0.78], "ok"), ("min", [0.9, 1.0, 1.2, 1.3, 1.5, 1.7, 1.9, 2.0], "ok"),
    ("max", [0.9, 0.7], "ok"), ("max", [0.5] * 8, "ok"), ("max", [2.0, 1.5, 1.2, math.nan, 0.9, 0.8, 0.7, 0.6], "ok"),
])  # fmt: skip
def test_a_plateau_scheduler_is_told_whose_metric_improves_against_its_mode(
    mode: Any, values: list[float], status: str, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, patience=1)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for value in values:
            optimizer.zero_grad()
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            scheduler.step(metrics=value)
    finding = run.diagnose()["loop.scheduler_unit"]
    assert finding.status == status, finding.summary
    assert status == "ok" or f"mode={mode!r}" in finding.summary
