"""How long it takes to list 10,000 trials, in 100 studies: the table of folders, and the same through the record's frames."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np

from workbench.config import TrainConfig
from workbench.ledger.studies import list_studies
from workbench.record.read import StudyRecord

STUDIES, TRIALS, ROUNDS = 100, 100, 5
CONFIG = TrainConfig(peak_lr=0.1, total_steps=100, batch_size=8).to_dict()
STUDY = {
    "kind": "lr_sweep",
    "note": "a note",
    "workload": "w",
    "config": CONFIG,
    "command": "workbench diagnose w",
    "facts": {},
}
EVENTS = [
    {"event": "started", "state": "running", "lanes": 4, "gradients": "loop"},
    {"event": "ended", "state": "complete", "steps_run": 10, "seconds": 1.0, "best_step": 3, "best_value": 0.5},
]


def make(root: Path) -> None:
    """Write the folders."""
    for name in (f"s{number:03d}" for number in range(STUDIES)):
        for trial in range(TRIALS):
            folder = root / name / "trials" / str(trial)
            folder.mkdir(parents=True)
            row = {"trial": trial, "stage": "lr_sweep", "seed": 0, "train_examples": 9, "config": CONFIG}
            (folder / "config.json").write_text(json.dumps(row))
            (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
        (root / name / "study.json").write_text(json.dumps(STUDY | {"name": name}))


def seconds(what: object) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    what()  # type: ignore[operator]
    return time.perf_counter() - began


def main() -> None:
    """Print the median of both, interleaved."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make(root)
        ways = {
            "list_studies": lambda: list_studies(root),
            "frames": lambda: [len(StudyRecord(path).trials) for path in root.iterdir()],
        }
        measured: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name, way in ways.items():
                took = seconds(way)
                if number:
                    measured[name].append(took)
        assert list_studies(root)["trials"].sum() == STUDIES * TRIALS
    for name, took in measured.items():
        print(
            f"{name:<14} {np.median(took):.2f} s ({min(took):.2f} to {max(took):.2f}) for {STUDIES * TRIALS:,} trials"
        )


if __name__ == "__main__":
    main()
