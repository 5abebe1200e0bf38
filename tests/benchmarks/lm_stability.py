"""Statements of Wortsman et al. 2023 (arXiv:2309.14322) about small language models, tried at 0.01M to 0.13M parameters: `python tests/benchmarks/lm_stability.py OUT`.

Two architecture studies of `source_lm`, over depth and over width, whose loss and logits against the learning rate answer each statement
with true or false. One seed, 200 steps, one thread: five minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import workbench as wb
from workbench.topics.architecture.figures import plot_sensitivity
from workbench.workloads.source_text import source_lm

LRS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
STEPS = 200
SIZES: dict[str, tuple[Callable[[int], dict[str, int]], tuple[int, ...]]] = {
    "depth": (lambda size: {"layers": size, "width": 32}, (1, 2, 4)),
    "width": (lambda size: {"layers": 2, "width": size}, (16, 32, 64)),
}


def variant(
    shape: Callable[[int], dict[str, int]], warmup: int = STEPS // 20, **options: Any
) -> Callable[[int], wb.Workload]:
    """Return the model of a size, trained with a warmup of so many steps."""

    def make(size: int) -> wb.Workload:
        workload = source_lm(total_steps=STEPS, **shape(size), **options)
        return workload.replace(config=workload.config.replace(warmup_steps=warmup, eval_every_steps=STEPS))

    return make


def studied(out: Path, over: str) -> Any:
    """Return the study over depth or width; what is there is not trained again."""
    shape, sizes = SIZES[over]
    variants = {
        "plain": variant(shape),
        "qk_norm": variant(shape, qk_norm=True),
        "z_loss": variant(shape, z_loss=1e-4),
        "warmup 25 %": variant(shape, warmup=STEPS // 4),
    }
    study = wb.architecture.Study(variants=variants, depths=sizes, lrs=LRS, steps=STEPS)
    return study.run(source_lm(total_steps=STEPS), out=out / over)


def logits(out: Path) -> pd.DataFrame:
    """Return the largest attention logit and |log Z| in the second half of each run."""
    rows = []
    for folder in sorted(out.glob("*/variants/*")):
        record = wb.open(folder)
        late = record.steps[record.steps["step"] >= STEPS // 2]
        for trial, part in late.groupby("trial"):
            lr = float(record.trials.set_index("trial")["peak_lr"][trial])
            rows.append((folder.name, lr, part["attention_logit"].max(), part["output_log_z"].abs().max()))
    return pd.DataFrame(rows, columns=["variant", "lr", "attention", "log_z"])


def main() -> None:
    """Train what is missing, and print each statement with its answer."""
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    tables = []
    for over in SIZES:
        record = studied(out, over)
        plot_sensitivity(record).figure.savefig(out / f"lm_stability_{over}.png", dpi=110)
        tables.append(wb.architecture.lr_sensitivity(record).assign(over=over))
    table = pd.concat(tables)
    sensitivity = table.pivot_table(index=["over", "depth"], columns="variant", values="sensitivity")
    seen = logits(out)
    plain, normed = (seen[seen["variant"].str.startswith(name)] for name in ("plain", "qk_norm"))
    free, held = plain, seen[seen["variant"].str.startswith("z_loss")]
    grows = {over: bool(part["plain"].is_monotonic_increasing) for over, part in sensitivity.groupby("over")}
    said = {
        "qk-norm lowers the sensitivity at every size": bool((sensitivity["qk_norm"] < sensitivity["plain"]).all()),
        "without qk-norm attention logits exceed 1e4 at some lr": bool((plain["attention"] > 1e4).any()),
        "with qk-norm they never exceed 100": bool((normed["attention"] <= 100).all()),
        "without qk-norm deeper models are more sensitive": grows["depth"],
        "without qk-norm wider models are more sensitive": grows["width"],
        "without z-loss |log Z| exceeds 100 at some lr, with it nowhere": bool((free["log_z"] > 100).any() and (held["log_z"] <= 100).all()),
        "z-loss lowers the sensitivity at every size": bool((sensitivity["z_loss"] < sensitivity["plain"]).all()),
        "a longer warmup lowers the sensitivity at every size": bool((sensitivity["warmup 25 %"] < sensitivity["plain"]).all()),
    }  # fmt: skip
    print(sensitivity.round(3).to_string())
    print(seen.groupby("variant")[["attention", "log_z"]].max().round(1).to_string())
    print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
