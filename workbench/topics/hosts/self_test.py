"""`python -m workbench.topics.hosts.self_test FOLDER BUG ...`: the planted training once for each bug, each under an audit of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from workbench.topics.hosts import planted
from workbench.topics.hosts.audit.watch import HostsWatch

__all__ = ["HEALTHY", "facts_folder", "main"]

HEALTHY = "healthy"
"""The name of the training without a bug."""


def facts_folder(folder: Path, bug: str) -> Path:
    """Return where the facts of a planted training go."""
    return folder / "facts" / bug


def main(words: list[str]) -> None:
    """Run the trainings of this rank.

    Args:
        words: the folder, and names of bugs.
    """
    folder = Path(words[0])
    dist.init_process_group("gloo")
    for bug in words[1:]:
        out = folder / "trained" / bug
        out.mkdir(parents=True, exist_ok=True)
        with HostsWatch(facts_folder(folder, bug)):
            planted.train("" if bug == HEALTHY else bug, out)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
