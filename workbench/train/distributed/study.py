"""A study that several hosts fill and one of them writes (P7.2): the others learn from it what there is already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workbench.record.write import SilentStudy, StudyWriter, TrialWriter
from workbench.train.checkpoint import SilentStore
from workbench.train.distributed.process_group import HostGroup
from workbench.train.distributed.resume import share_checkpoint
from workbench.train.lane import Lane

__all__ = ["begin_together", "finished", "open_together"]


def open_together(hosts: HostGroup, opened: Callable[[], StudyWriter]) -> StudyWriter:
    """Return the study on the main host, and one that writes nothing on the others.

    Args:
        hosts: the group.
        opened: opens the study; called on the main host alone.

    Raises:
        WorkbenchError: what `opened` raised there, on all hosts.
    """
    if hosts.size == 1:
        return opened()
    studies: list[StudyWriter] = []

    def path() -> str:
        studies.append(opened())
        return str(studies[0].path)

    told = hosts.on_main(path)
    return studies[0] if studies else SilentStudy(Path(told))


def finished(hosts: HostGroup, writer: TrialWriter) -> bool:
    """Return whether the trial ran to its end before; a host that does not write learns the trial's number, too."""
    known = hosts.on_main(lambda: [writer.finished, writer.number])
    writer.number = int(known[1])
    return bool(known[0])


def begin_together(hosts: HostGroup, lane: Lane) -> Lane:
    """Return the lane with the checkpoint that it goes on from, which the main host read."""
    lane.start = share_checkpoint(hosts, lane.start)
    if not hosts.main and lane.start is not None:
        lane.checkpoints = SilentStore(lane.start.step)
    return lane
