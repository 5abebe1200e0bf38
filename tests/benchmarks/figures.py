"""Figures 4, 7a and 7b of the playbook on our own workloads, and what they state as booleans (F1.3, F1.12, F1.13, F3.16).

    python tests/benchmarks/figures.py                           # every case, three seeds: about half an hour
    python tests/benchmarks/figures.py digits_resnet --images docs/images --out runs/figures

A case is a baseline, a modification of it, and learning rates; the third arm is the modification with a warmup over a
tenth of the steps. With --out the studies stay, and the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import torch

import workbench as wb
from workbench.topics.comparison.diagnose import Arms
from workbench.workloads.sklearn_data import deep_residual, digits_resnet
from workbench.workloads.source_text import source_text


class Case(NamedTuple):
    """A baseline, its modification, how both are trained, and in words what was changed; no picture here shows the probe."""

    baseline: wb.Workload
    modified: wb.Workload
    lrs: Sequence[float]
    steps: int
    change: str
    probe_steps: int = 500


def grid(first: float, count: int) -> list[float]:
    """Return `count` learning rates from `first` on, each twice the one before."""
    return [first * 2.0**k for k in range(count)]


def cases() -> dict[str, Case]:
    return {
        "digits_resnet": Case(
            digits_resnet(), digits_resnet(stride=1), grid(0.1, 7), 400, "stride of a block 2 -> 1"
        ),
        "deep_residual": Case(
            deep_residual(norm="pre"), deep_residual(norm="after_add"), grid(0.002, 9), 1000, "x + f(Norm(x)) -> Norm(x + f(x))"
        ),
        "source_text": Case(
            source_text(layers=4), source_text(layers=4, norm="after_add"), grid(0.00025, 10), 600,
            "x + f(Norm(x)) -> Norm(x + f(x))", probe_steps=20,
        ),
    }  # fmt: skip


def compare(case: Case, *, seeds: int, out: Path) -> Arms:
    """Train the three arms of a case."""
    signs = wb.stability.Study(fixes=(), probe_steps=case.probe_steps)
    study = wb.comparison.Study(lrs=case.lrs, seeds=seeds, steps=case.steps, instability=signs)
    return study.run(case.baseline, case.modified, wb.Trainer(device="cpu"), out=out)


def said(name: str, case: Case, arms: Arms, statements: wb.Diagnosis) -> Iterator[str]:
    """Each statement with its boolean, and the sentence that says what it rests on."""
    yield f"{name}: {case.change}; {case.steps:,} steps"
    for finding in statements:
        yield f"  {_shown(finding.evidence['holds']):<12} {finding.code:<24} {finding.summary}"
    edge = wb.lr_sweep.diagnose(arms.modified)["lr.at_edge"]
    yield f"  {_shown(edge.evidence.get('at_edge')):<12} {'7a: best lr at the edge':<24} {edge.summary}"
    best = arms.modified.facts.get("lr_star", float("nan"))
    for row in wb.stability.diagnose(arms.modified)["stability.mid"].evidence.get("confirm", ()):
        shown = f"{row['lr'] / best:.3g} times the best lr, {row['lr']:.4g}: {row['shape']}, {row['outcome']}"
        at = "" if row["jump_step"] is None else f", after step {row['jump_step']:,}"
        yield f"  {row['shape'] == 'rise after decline'!s:<12} {'7b: decline, then rise':<24} {shown}{at}"


def _shown(holds: bool | None) -> str:
    return "not measured" if holds is None else str(holds)


def draw(name: str, case: Case, arms: Arms, statements: wb.Diagnosis, file: Path) -> None:
    """Draw figures 4, 7a and 7b side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    sweep, stability = wb.lr_sweep.diagnose(arms.modified), wb.stability.diagnose(arms.modified)
    wb.comparison.plot(*arms, statements, ax=left).set_title(f"4: {name}, {case.change}", loc="left", fontsize=11)
    wb.lr_sweep.plot(arms.modified, sweep, ax=middle).set_title("7a: the modified sweep", loc="left", fontsize=11)
    wb.stability.plot_confirm(arms.modified, sweep + stability, ax=right).set_title(
        "7b: at 5 and 10 times its best lr", loc="left", fontsize=11
    )
    figure.savefig(file, dpi=80)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print and draw the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", default=[], help=f"of {', '.join(cases())}; all without one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a trial; the case's own without it")
    parser.add_argument("--out", type=Path, help="folder of the studies; a temporary one without it")
    parser.add_argument("--images", type=Path, help="folder of the pictures, figures_<case>.png; none without it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    mpl.use("agg")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.case or cases():
            case = cases()[name]
            case = case._replace(steps=options.steps or case.steps)
            arms = compare(case, seeds=options.seeds, out=(options.out or Path(scratch)) / name)
            statements = wb.comparison.diagnose(*arms, min_seeds=min(2, options.seeds))
            for line in said(name, case, arms, statements):
                print(line, flush=True)
            if options.images is not None:
                options.images.mkdir(parents=True, exist_ok=True)
                draw(name, case, arms, statements, options.images / f"figures_{name}.png")


if __name__ == "__main__":
    main()
