"""What it costs to begin: imports and `--help`, against `import torch`; and what a record costs on disk.

python tests/benchmarks/bench_start.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from timing import machine, median, ratio, rounds

import workbench as wb

CODE = {
    "python": "pass",
    "import torch": "import torch",
    "import workbench": "import workbench",
    "from workbench import Trainer": "from workbench import Trainer",
    "workbench --help": "from workbench.cli import main; raise SystemExit(main(['--help']))",
}


def run(code: str) -> None:
    """Run a fresh interpreter."""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def start() -> None:
    """Print seconds and ratios of a fresh interpreter that does one thing."""
    seconds = rounds({name: (lambda c=code: run(c)) for name, code in CODE.items()}, count=7)
    bare = median(seconds["python"])
    for name, values in seconds.items():
        print(f"{name:<42} {median(values) - bare:.3f} s beyond a bare interpreter")
    both = ratio(seconds["from workbench import Trainer"], seconds["import torch"])
    print(f"from workbench import ... / import torch   {both}   budget 1.5")


def disk(steps: int = 20_000) -> None:
    """Print the bytes of one long trial's rows, per million steps, default instruments."""
    workload = wb.load_workload("digits_mlp")
    config = workload.config.replace(total_steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        record = wb.Trainer(device="cpu").run(workload, config, out=Path(folder) / "run")
        size = sum(p.stat().st_size for p in (record.path / "steps").iterdir())
    print(f"steps/ on disk: {size / steps:.1f} bytes a step, {size / steps:.0f} MB per 1e6 steps")


if __name__ == "__main__":
    print(machine())
    start()
    disk()
