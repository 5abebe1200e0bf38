"""`python -m workbench.topics.hosts.rehearsal SPEC`: a workload trained for some steps on all ranks, by the trainer itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.train.distributed.data_parallel import check_shares
from workbench.train.distributed.process_group import HostGroup
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.registry import load_workload

__all__ = ["check_rehearsal", "main"]


def check_rehearsal(workload: Workload, config: TrainConfig, hosts: int) -> None:
    """Refuse what cannot be trained on several hosts, before any process starts.

    Args:
        workload: what is trained.
        config: how.
        hosts: processes that share each batch.

    Raises:
        UsageError: no other process can load the workload.
        ConfigError: a batch cannot be shared out evenly.
    """
    if workload.source is None:
        raise UsageError(
            f"workload {workload.name!r} was built in this process, and other processes cannot load it. Put it into a file and "
            "name it: load_workload('path/to/file.py:attribute')."
        )
    check_shares(config, HostGroup(size=hosts))


def main(words: list[str]) -> None:
    """Train on this rank, on the CPU.

    Args:
        words: path of a JSON file: {"workload": name, "config": fields, "out": folder of the trial}.
    """
    spec: Mapping[str, Any] = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    workload = load_workload(spec["workload"])
    Trainer(device="cpu").run(workload, workload.config.replace(**spec["config"]), out=spec["out"])


if __name__ == "__main__":
    main(sys.argv[1:])
