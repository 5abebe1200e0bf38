"""Small studies, one of each kind, trained once and kept: `python -m tests.golden.canned` trains those that are missing.

What is kept of one is its record without checkpoints, `records/<kind>.zip`, and what was said of it, `said/<kind>.json`.
`python -m tests.golden.canned --say` writes the latter again, after a change that is meant.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from tests.golden.said import helps, said_of
from tests.helpers.workloads import small_workload

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
RECORDS, SAID = HERE / "records", HERE / "said"
_EPOCH = (2026, 1, 1, 0, 0, 0)


def _norm() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


SMALL: dict[str, Any] = {"eval_every_steps": 10}
LRS = (0.01, 0.05, 0.2, 1.0, 4.0)

STUDIES: Mapping[str, Callable[[Path], object]] = {
    "diagnosis": lambda out: wb.diagnose("breast_cancer", out, steps=150),
    "lr_sweep": lambda out: wb.lr_sweep.Study(lrs=LRS).run(wb.load_workload("breast_cancer"), out=out),
    "instability": lambda out: wb.stability.Study(sweep=wb.lr_sweep.Study(refinements=0), probe_steps=40, fixes=("warmup", "clipping")).run(
        wb.load_workload("catapult"), out=out
    ),
    "warmup": lambda out: wb.warmup.Study(full_runs=2, steps=100).run(wb.load_workload("valley"), out=out),
    "clipping": lambda out: wb.clipping.Study(peak_lr=0.4, percentiles=(90.0, 50.0), halvings=0).run(small_workload(config=SMALL), out=out),
    "batch_size": lambda out: wb.batch_size.Study(batch_sizes=[4, 16]).run(small_workload(config=SMALL), out=out),
    "batch_norm": lambda out: wb.batch_norm.Study(
        stat_examples=[4, 16], batch_sizes=[8, 16], held=8, swap_batch_sizes=[4], lr_factors=[0.5, 1.0], seeds=2
    ).run(small_workload(build_model=_norm, config=SMALL | {"batch_size": 16}), out=out),
    "optimizers": lambda out: wb.optimizers.Study(optimizers=("sgd", "adam"), seeds=1).run(small_workload(config=SMALL), out=out),
    "architecture": lambda out: wb.architecture.Study(variants={}).run(wb.load_workload("source_text_post_norm"), out=out),
    "evaluation": lambda out: wb.evaluation.Study(evaluations=12).run(small_workload(config=SMALL), out=out),
    "evaluation_sample": lambda out: wb.evaluation.SampleStudy(size=50, smallest_difference=0.3).run(wb.load_workload("breast_cancer"), out=out),
    "checkpoints": lambda out: wb.checkpoints.Study(seeds=2, resume=False, evaluations=8).run(small_workload(config=SMALL), out=out),
    "input_pipeline": lambda out: wb.input.Study(steps=30, seconds=1.0, max_workers=1, trace=False).run(small_workload(), out=out),
    "parameter_server": lambda out: wb.ps.Study().run(small_workload(config=SMALL), out=out),
}  # fmt: skip
"""Kind -> what trains one in a folder."""


def pack(study: Path, target: Path) -> None:
    """Keep a study's record without checkpoints, reports and locks."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(p for p in study.rglob("*") if p.is_file()):
            inside = path.relative_to(study)
            if (
                inside.parts[0] in (".lock", "figures", "report.html", "repro.patch", "diagnosis.json")
                or "checkpoints" in inside.parts
            ):
                continue
            held = path.read_bytes()
            if path.suffix in (".json", ".jsonl"):  # where it was trained is nobody's business
                held = held.replace(f"{ROOT}{os.sep}".encode(), b"")
            archive.writestr(zipfile.ZipInfo(str(inside), _EPOCH), held, zipfile.ZIP_DEFLATED)


def unpack(kind: str, folder: Path) -> Path:
    """Return the folder of a kept record."""
    with zipfile.ZipFile(io.BytesIO((RECORDS / f"{kind}.zip").read_bytes())) as archive:
        archive.extractall(folder / kind)
    return folder / kind


def main() -> None:
    """Train what is missing, and write what is said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--say", action="store_true", help="write again what is said of the records that are there")
    parser.add_argument("kinds", nargs="*", default=list(STUDIES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["WORKBENCH_LIVE"] = "0"
    for folder in (RECORDS, SAID):
        folder.mkdir(exist_ok=True)
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as scratch:
            if not (RECORDS / f"{kind}.zip").exists():
                with chdir(scratch):
                    STUDIES[kind](Path("runs") / kind)
                    pack(Path("runs") / kind, RECORDS / f"{kind}.zip")
            elif not given.say:
                continue
            _write(kind, said_of(unpack(kind, Path(scratch) / "kept")))
    if given.say:
        _write("cli", helps())


def _write(name: str, said: Mapping[str, Any]) -> None:
    (SAID / f"{name}.json").write_text(_lines(said, 3) + "\n")
    print(name, flush=True)


def _lines(value: Any, depth: int, margin: str = "") -> str:
    """Return JSON with a line for each part, down to a depth: a finding or a line of the report each."""
    if not depth or not value or not isinstance(value, (dict, list)):
        return json.dumps(value, sort_keys=True)
    inside = margin + " "
    if isinstance(value, dict):
        rows = [f"{inside}{json.dumps(key)}: {_lines(value[key], depth - 1, inside)}" for key in sorted(value)]
        return "{\n" + ",\n".join(rows) + f"\n{margin}}}"
    return "[\n" + ",\n".join(f"{inside}{_lines(each, depth - 1, inside)}" for each in value) + f"\n{margin}]"


if __name__ == "__main__":
    main()
