"""How often verdicts are right at what they may cost, as a table and a curve: `python -m tests.zoo.budgets 1=build/zoo/1x 3=build/zoo/3x 10=build/zoo/10x`.

Each argument is a number of baseline runs and the folder that `python -m tests.zoo --budget ... --out` wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from tests.zoo.score import FAULT_SCORES, HEALTHY_SCORES, share
from workbench.curves.class_counts import wilson

CURVES = {
    "a planted fault is named": "detected",
    "it comes first": "first",
    "a healthy training is alarmed": "any alarm",
}
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "budgets.png"


def read(folder: Path) -> tuple[list[Any], list[Any]]:
    """Return the results of planted faults and of healthy trainings."""
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    told = [
        said for said in told if isinstance(said, dict) and "accepts" in said and not said["case"].startswith("pair/")
    ]
    return [said for said in told if said["accepts"]], [said for said in told if not said["accepts"]]


def main(given: Sequence[str]) -> None:
    """Print the table, and draw the shares with their 95 % intervals over the budget."""
    sides = {float(budget): read(Path(folder)) for budget, _, folder in (each.partition("=") for each in given)}
    scores = {**FAULT_SCORES, **HEALTHY_SCORES}
    print(f"| baseline runs | faults | healthy | {' | '.join(CURVES)} |\n" + "| --- " * (3 + len(CURVES)) + "|")
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, score in CURVES.items():
        parts = {budget: sides[budget][score == "any alarm"] for budget in sorted(sides)}
        counts = {budget: (sum(map(scores[score], told)), len(told)) for budget, told in parts.items()}
        means = [count / most for count, most in counts.values()]
        low, high = zip(*(wilson(*each) for each in counts.values()), strict=True)
        errors = [[m - a for m, a in zip(means, low, strict=True)], [b - m for m, b in zip(means, high, strict=True)]]
        axes.errorbar([*counts], means, errors, marker="o", capsize=3, label=name)
    for budget, (faults, healthy) in sorted(sides.items()):
        told = [share(healthy if score == "any alarm" else faults, scores[score]) for score in CURVES.values()]
        print(f"| {budget:g} | {len(faults)} | {len(healthy)} | {' | '.join(told)} |")
    axes.set(xscale="log", xlabel="budget, baseline runs", ylabel="share, with its 95 % interval", ylim=(0, 1))
    axes.set_xticks([*sides], [f"{budget:g}" for budget in sides])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="center right")
    figure.savefig(PICTURE, dpi=120)


if __name__ == "__main__":
    main(sys.argv[1:])
