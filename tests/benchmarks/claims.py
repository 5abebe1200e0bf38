"""The playbook's claims that no other script measures, each with the numbers it rests on (docs/claims.md lists all of them).

python tests/benchmarks/claims.py                  # every experiment: about a quarter of an hour on two cores
python tests/benchmarks/claims.py F3.7 F3.8        # some of them
python tests/benchmarks/claims.py F3.16            # 10,000 steps a run: half an hour, only when asked for
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

import workbench as wb
from workbench.workloads.analytic import valley
from workbench.workloads.sklearn_data import deep_residual, digits_data, digits_resnet
from workbench.workloads.source_text import source_text

Curves = dict[tuple[str, int], np.ndarray]
"""(arm, seed) -> training loss, shape (steps,)."""


class Arm(NamedTuple):
    """A config to train under each seed."""

    name: str
    workload: wb.Workload
    config: wb.TrainConfig


def train(arms: Sequence[Arm], seeds: int = 2) -> Curves:
    """Return the training loss of every arm under every seed."""
    found: Curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for k, (name, workload, config) in enumerate(arms):
            quiet = config.replace(eval_every_steps=config.total_steps, checkpoint_every_steps=config.total_steps)
            study = wb.lr_sweep.Study(lrs=[quiet.peak_lr], seeds=seeds, steps=quiet.total_steps)
            record = study.run(workload.replace(config=quiet), wb.Trainer(device="cpu"), out=Path(folder) / str(k))
            for trial, seed in zip(record.trials["trial"], record.trials["seed"], strict=True):
                loss = record.steps[record.steps["trial"] == trial]["loss"].to_numpy()
                found[name, int(seed)] = np.pad(loss, (0, quiet.total_steps - loss.size), constant_values=math.nan)
    return found


def trains(loss: np.ndarray, *, upto: int | None = None) -> bool:
    """Whether the median of the last tenth lies below half of the initial loss: what "stable" means on this page."""
    seen = loss[:upto]
    tail = np.median(seen[-max(1, len(seen) // 10) :])
    return bool(np.isfinite(tail) and tail < 0.5 * loss[0])


def grid(first: float, count: int, factor: float = 2.0) -> list[float]:
    """Return `count` learning rates from `first` on."""
    return [first * factor**k for k in range(count)]


def with_warmup(config: wb.TrainConfig, steps: int) -> wb.TrainConfig:
    """Return the config with a ramp in front (F3.11, F3.13)."""
    return config.replace(warmup_steps=steps, total_steps=config.total_steps + steps)


def every_workload_diverges() -> Iterator[str]:
    """F1.4: every workload is unstable at some learning rate; it matters only where that forces a small one."""
    names = ("digits_mlp", "digits_cnn", "digits_resnet", "deep_residual", "source_text", "breast_cancer", "quadratic", "valley", "catapult")  # fmt: skip
    finite = 0
    for name in names:
        workload = wb.load_workload(name)
        with tempfile.TemporaryDirectory() as folder:
            steps = min(workload.config.total_steps, 300)
            record = wb.lr_sweep.Study(refinements=0, steps=steps).run(
                workload, wb.Trainer(device="cpu"), out=Path(folder) / "s"
            )
            found = wb.lr_sweep.diagnose(record)
        best, edge = found["lr.best"].value, found["lr.unstable"].value
        finite += edge is not None
        ratio = math.nan if edge is None or best is None else edge / best
        yield f"{name:<16} {steps:>4} steps: lr.best {best or math.nan:.4g}, lr.unstable {edge or math.nan:.4g}, ratio {ratio:.3g}"
    yield f"HOLDS {finite == len(names)}: an unstable lr was found on {finite} of {len(names)} workloads"


def ranking_of_fixes() -> Iterator[str]:
    """F2.1 to F2.3: which fix opens the largest learning rate, and the lowest loss, where training dies early."""
    steps, lrs = 400, grid(0.0005, 11)
    for title, make in (
        ("weights twice as large, momentum", lambda: deep_residual(init_scale=2.0, total_steps=steps)),
        ("norm after the addition, Adam", lambda: deep_residual(depth=16, norm="after_add", total_steps=steps)),
    ):
        workload = make()
        base = workload.config.replace(optimizer="adam") if "Adam" in title else workload.config
        fixes: dict[str, Callable[[wb.TrainConfig], wb.TrainConfig]] = {
            "nothing": lambda c: c,
            "warmup, a tenth": lambda c: with_warmup(c, steps // 10),
            "clipping at 1": lambda c: c.replace(max_grad_norm=1.0),
            "both": lambda c: with_warmup(c, steps // 10).replace(max_grad_norm=1.0),
            "the other rule": lambda c: c.replace(optimizer="momentum" if c.optimizer == "adam" else "adam"),
        }
        rows = []
        for name, fix in fixes.items():
            arms = [Arm(f"{lr}", workload, fix(base.replace(peak_lr=lr))) for lr in lrs]
            curves = train(arms)
            stable = [lr for lr in lrs if all(trains(curves[f"{lr}", s]) for s in (0, 1))]
            ends = [float(np.mean([np.median(curves[f"{lr}", s][-40:]) for s in (0, 1)])) for lr in stable]
            rows.append((max(stable, default=math.nan), min(ends, default=math.nan), name))
        yield f"{title}: {steps} steps, 2 seeds"
        for top, end, name in sorted(rows, key=lambda r: r[1]):
            yield f"  {name:<16} largest lr that trains {top:.4g}, lowest training loss {end:.4g}"
        warm = {name: end for _, end, name in rows}
        yield f"HOLDS {warm['warmup, a tenth'] <= min(warm.values()) * 1.05}: warmup among the best of the five"


def hold_factor() -> Iterator[str]:
    """F3.7: after a ramp of w steps, watching 2 w more tells whether the run will stay stable."""
    steps, factors = 1000, (0.5, 1, 2, 5, 10)
    wrong = dict.fromkeys(factors, 0)
    said = dict.fromkeys(factors, 0)
    cases = [(valley(total_steps=steps), lr) for lr in (0.05, 0.1)]
    cases += [(deep_residual(init_scale=1.5, total_steps=steps), lr) for lr in (0.02, 0.04, 0.08)]
    cases += [(source_text(layers=4, width=32, length=16, norm="after_add"), lr) for lr in (0.004, 0.008)]
    for workload, lr in cases:
        for warmup in (10, 30, 80):
            config = with_warmup(workload.config.replace(peak_lr=lr, total_steps=steps, schedule="constant"), warmup)
            for loss in train([Arm("a", workload, config)]).values():
                for factor in factors:
                    seen = round(warmup * (1 + factor))
                    low = float(np.max(loss[max(0, seen - max(3, seen // 10)) : seen]))
                    stable = math.isfinite(low) and low <= loss[0]
                    said[factor] += stable
                    wrong[factor] += stable and not (np.isfinite(loss[-1]) and np.median(loss[-100:]) <= loss[0] * 0.9)
    for factor in factors:
        yield f"hold of {factor:>4} ramps: {wrong[factor]} of {said[factor]} runs called stable are not at the full length"
    yield f"HOLDS {wrong[2] <= wrong[10]}: twice the ramp is wrong {wrong[2]} times, ten times the ramp {wrong[10]}"


def warmup_without_decay() -> Iterator[str]:
    """F3.8: the warmup may be tuned without regard to the decay."""
    steps, lengths, schedules = 600, (0, 3, 10, 30, 100), ("constant", "linear", "cosine")
    alike = total = 0
    for workload, lr in ((deep_residual(init_scale=2.0, total_steps=steps), 0.005), (valley(total_steps=steps), 0.05)):
        table: dict[tuple[int, int], list[bool]] = {}
        for schedule in schedules:
            config = workload.config.replace(peak_lr=lr, total_steps=steps, schedule=schedule)
            curves = train([Arm(f"{w}", workload, with_warmup(config, w)) for w in lengths])
            for (w, seed), loss in curves.items():
                table.setdefault((int(w), seed), []).append(trains(loss))
        same = sum(len(set(row)) == 1 for row in table.values())
        alike, total = alike + same, total + len(table)
        shortest = [min((w for (w, _), row in table.items() if row[k]), default=None) for k in range(len(schedules))]
        yield f"{workload.name}: the shortest that trains: " + ", ".join(
            f"{s} {w}" for s, w in zip(schedules, shortest, strict=True)
        )
    yield f"HOLDS {alike == total}: {alike} of {total} verdicts are the same under all three schedules"


def shortest_warmup() -> Iterator[str]:
    """F3.15: no length of warmup is typical for all workloads."""
    deep = deep_residual(init_scale=2.0)
    families: Mapping[str, tuple[wb.Workload, Sequence[float]]] = {
        "MLP": (wb.load_workload("digits_mlp"), (0.2, 0.3)),
        "convolutional, batch norm": (wb.load_workload("digits_cnn"), (0.4, 0.6)),
        "residual without norm": (deep.replace(config=deep.config.replace(optimizer="sgd")), (0.006, 0.012)),
        "transformer, post-norm": (wb.load_workload("source_text_post_norm"), (0.002, 0.003)),
    }
    lengths, found = (0, 3, 10, 30, 100, 300), set()
    for name, (workload, lrs) in families.items():
        for lr in lrs:
            config = workload.config.replace(peak_lr=lr, total_steps=500)
            curves = train([Arm(f"{w}", workload, with_warmup(config, w)) for w in lengths])
            good = [w for w in lengths if all(trains_text(curves[f"{w}", s], workload) for s in (0, 1))]
            found.add(min(good, default=None))
            yield f"{name:<26} lr {lr:<6.4g} the shortest that trains under both seeds: {min(good, default=None)} of {lengths}"
    spread = {w for w in found if w}
    yield f"HOLDS {len(spread) > 1 and max(spread) >= 10 * min(spread)}: shortest lengths found: {sorted(found, key=lambda w: -1 if w is None else w)}"


def trains_text(loss: np.ndarray, workload: wb.Workload) -> bool:
    """The same as `trains`; a language model has to get below the entropy of single bytes, 3.1 nats in this text."""
    return bool(np.median(loss[-60:]) < 2.9) if workload.name.startswith("source_text") else trains(loss)


def online_under_shift() -> Iterator[str]:
    """P2.1: what is measured while the model serves is nearest to what counts, where the stream differs from the offline set."""
    data = digits_data(flat=True)
    workload = wb.load_workload("digits_mlp")
    gaps: dict[str, list[float]] = {"offline": [], "online": []}
    for seed in range(5):
        with tempfile.TemporaryDirectory() as folder:
            config = workload.config.replace(total_steps=400, shared_seed=seed, per_host_seed=seed)
            trial = wb.Trainer(device="cpu").run(workload, config, out=Path(folder) / "t")
            model = wb.checkpoints.load_trained(workload, trial)
        inputs, labels = stack(data["test_data"])
        rng = np.random.default_rng(seed)
        # Served are more of some digits than others, and darker scans.
        weight = np.exp(rng.normal(size=10))[labels.numpy()]
        stream = rng.choice(len(labels), size=1200, p=weight / weight.sum())
        shifted = inputs[stream] * 0.5 + 0.4 * torch.randn(len(stream), inputs.shape[1], generator=torch.Generator().manual_seed(seed))  # fmt: skip
        right = (answer(model, shifted) == labels[stream]).float()
        truth, online = float(right[300:].mean()), float(right[:300].mean())
        validation = stack(data["validation_data"])
        offline = float((answer(model, validation[0]) == validation[1]).float().mean())
        gaps["offline"].append(abs(offline - truth))
        gaps["online"].append(abs(online - truth))
    for name, values in gaps.items():
        yield f"{name:<8} accuracy is off from that of the 900 later requests by {np.mean(values):.3f} (worst of 5 seeds {max(values):.3f})"
    yield f"HOLDS {np.mean(gaps['online']) < 0.5 * np.mean(gaps['offline'])}: 300 served requests against a whole offline split of another kind"


def stack(data: TensorDataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all inputs and labels of a split."""
    items = [data[k] for k in range(len(data))]
    return torch.stack([x for x, _ in items]), torch.stack([torch.as_tensor(y) for _, y in items])


def answer(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the most likely classes."""
    with torch.no_grad():
        return model(inputs).argmax(1)


def file_shards() -> Iterator[str]:
    """P7.4: files shared out over the hosts are read faster than all files by every host."""
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        paths = [Path(folder) / f"part-{k:02}.bin" for k in range(16)]
        for path in paths:
            path.write_bytes(rng.bytes(4096 * 500))
        table = wb.hosts.measure_file_shards(paths, hosts=4)
    ways = table.groupby("files").agg(
        bytes_read=("bytes_read", "sum"), examples=("examples", "sum"), seconds=("seconds", "max")
    )
    rates = (ways["examples"] / ways["seconds"]).to_dict()
    for way, row in ways.iterrows():
        yield f"{way:<8} {row['bytes_read'] / 1e6:.1f} MB read by 4 hosts, {rates[str(way)]:,.0f} examples/s"
    yield f"HOLDS {rates['sharded'] > rates['all']}: {rates['sharded'] / rates['all']:.2g} times the examples a second"


def warmup_of_a_thousand() -> Iterator[str]:
    """F1.3, F3.16: the stride change costs only high learning rates, and 1,000 warmup steps allow lr 0.1."""
    steps, lrs = 9000, (0.025, 0.1, 0.4)
    base, changed = digits_resnet(), digits_resnet(stride=1)
    arms = [Arm(f"base {lr}", base, base.config.replace(peak_lr=lr, total_steps=steps)) for lr in lrs]
    arms += [Arm(f"changed {lr}", changed, changed.config.replace(peak_lr=lr, total_steps=steps)) for lr in lrs]
    arms += [Arm(f"warmup {lr}", changed, with_warmup(changed.config.replace(peak_lr=lr, total_steps=steps), 1000)) for lr in lrs]  # fmt: skip
    curves = train(arms, seeds=1)
    for arm in arms:
        loss = curves[arm.name, 0]
        yield f"{arm.name:<14} trains {trains(loss)}, median loss of the last tenth {np.median(loss[-steps // 10 :]):.4g}"
    ends = {a.name: trains(curves[a.name, 0]) for a in arms}
    yield f"HOLDS {ends['warmup 0.1'] and not ends['changed 0.1']}: at lr 0.1 the changed net trains with 1,000 warmup steps and not without"


EXPERIMENTS: dict[str, Callable[[], Iterator[str]]] = {
    "F1.4": every_workload_diverges,
    "F2.1": ranking_of_fixes,
    "F3.7": hold_factor,
    "F3.8": warmup_without_decay,
    "F3.15": shortest_warmup,
    "P2.1": online_under_shift,
    "P7.4": file_shards,
    "F3.16": warmup_of_a_thousand,
}


def main() -> None:
    """Print every experiment's rows; the line that begins with HOLDS says what follows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "claims", nargs="*", choices=[*EXPERIMENTS, []], default=[name for name in EXPERIMENTS if name != "F3.16"]
    )
    for name in parser.parse_args().claims:
        print(f"{name}: {(EXPERIMENTS[name].__doc__ or '').split(': ', 1)[1]}", flush=True)
        for line in EXPERIMENTS[name]():
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
