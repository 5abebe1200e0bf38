"""Is what was adopted better? Adopted configs against their baselines, in a loop of our own, over seeds nobody chose by."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t

from tests.zoo import plain
from tests.zoo.cases import CASES

SEEDS = range(1000, 1005)


def compared(said: dict[str, Any]) -> dict[str, Any]:
    """Return the best validation loss of the baseline's and the adopted config's runs, one a seed, and what follows."""
    torch.set_num_threads(1)
    workload = CASES[said["case"]].named().workload()
    adopted = workload.config.replace(**said["config"])
    values: dict[str, list[float]] = {"baseline": [], "adopted": []}
    for seed in SEEDS:
        for name, config in (("baseline", workload.config), ("adopted", adopted)):
            try:
                values[name].append(plain.train(workload, config, seed)["best"])
            except Exception:  # what cannot be trained is no better than a run that diverged
                values[name].append(math.inf)
    return {"case": said["case"], "half": said["half"], "accepts": said["accepts"], "area": said["area"], "changed": said["changed"],
            **values, "result": judged(values["baseline"], values["adopted"])}  # fmt: skip


def judged(baseline: Sequence[float], adopted: Sequence[float], *, alpha: float = 0.05) -> str:
    """Return "better", "same" or "worse" by a paired t test of both sides; a run that never was finite loses its pair."""
    lost = [math.isinf(a) - math.isinf(b) for a, b in zip(adopted, baseline, strict=True)]
    if any(lost):
        return "worse" if sum(lost) > 0 else "better" if sum(lost) < 0 else "same"
    gains = [b - a for a, b in zip(adopted, baseline, strict=True) if math.isfinite(a)]
    if len(gains) < 2:
        return "same"
    mean, spread = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    if abs(mean) <= t.ppf(1 - alpha / 2, len(gains) - 1) * spread or mean == 0:
        return "same"
    return "better" if mean > 0 else "worse"


def retrain(told: Sequence[dict[str, Any]], path: Path, *, workers: int) -> list[dict[str, Any]]:
    """Return one comparison for each adopted config; those that `path` holds are not trained again."""
    kept = {c["case"]: c for c in json.loads(path.read_text())} if path.exists() else {}
    missing = [said for said in told if said.get("adopted") and said["case"] not in kept]
    with get_context("fork").Pool(workers) as pool:
        for found in pool.imap_unordered(compared, missing):
            kept[found["case"]] = found
    path.write_text(json.dumps(list(kept.values()), indent=1))
    names = {said["case"] for said in told if said.get("adopted")}
    return [found for name, found in kept.items() if name in names]
