"""A Chrome trace of some steps, with spans of their own for loading and for the step (P1.2)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from workbench.errors import UsageError
from workbench.topics.data.order import untouched
from workbench.topics.input.loaders import batches_of, closed, timed_loader, torch_loader
from workbench.topics.input.timed import TimedBatch
from workbench.train.rng import isolated_rng

__all__ = ["LOADING", "STEP", "write_trace"]

LOADING, STEP = "data loading", "training step"
"""Names of the spans."""


def write_trace(
    loader: Any, stepping: Any, path: str | Path, *, steps: int = 20, timeout_s: float = 60.0
) -> dict[str, Any]:
    """Write a trace that https://ui.perfetto.dev opens.

    Args:
        loader: a `DataLoader`, or whatever gives batches.
        stepping: what is done with them.
        path: ends in .json or .json.gz; its folder is made.
        steps: to trace, at most.
        timeout_s: for a batch.

    Returns:
        "path", "steps".
    """
    file = Path(path)
    if not file.name.endswith((".json", ".json.gz")):
        raise UsageError(f"trace={str(path)!r} must end in .json or .json.gz: it is a Chrome trace.")
    file.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    own = torch_loader(loader)
    with (
        untouched(loader) if isinstance(loader, DataLoader) else isolated_rng(),
        closed(timed_loader(own) if own is not None else loader) as timed,
    ):
        batches = iter(batches_of(timed, timeout_s=timeout_s))
        done = 0
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "6"
        )  # or torch's profiler writes to the terminal whenever it starts and stops
        with profile(activities=activities) as profiler:
            while done < steps:
                with record_function(LOADING):
                    batch = next(batches, None)
                if batch is None:
                    break
                with record_function(STEP):
                    if stepping.step is not None:
                        stepping.step(batch.data if isinstance(batch, TimedBatch) else batch)
                done += 1
            stepping.device.wait()
        batches.close()  # type: ignore[attr-defined]  # a generator: its worker processes are gone with it
    profiler.export_chrome_trace(str(file))
    return {"path": str(file), "steps": done}
