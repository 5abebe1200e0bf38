"""What goes wrong in a cluster of workers and parameter servers: who failed, and what became of a closure."""

from __future__ import annotations

from typing import Literal

from workbench.errors import ClusterError, WorkbenchError

Job = Literal["worker", "ps"]


class CancelledError(WorkbenchError):
    """A closure did not run to its end because another one failed (T12.1); schedule it again."""

    def __init__(
        self, message: str = "This function was cancelled because another one failed. Schedule it again."
    ) -> None:
        super().__init__(message)


class ClosureInputError(WorkbenchError):
    """An argument of a closure could not be built on its worker, such as a per-worker dataset; `__cause__` says why."""


class NotHeldError(ClosureInputError):
    """A worker does not hold what a closure needs.

    Attributes:
        worker: its index.
        resource: id of what it should hold.
    """

    def __init__(self, worker: int, resource: int) -> None:
        super().__init__(worker, resource)  # these two make it again where it was pickled
        self.worker = worker
        self.resource = resource

    def __str__(self) -> str:
        """Say what is missing, and why."""
        return f"Worker {self.worker} does not hold resource {self.resource}: its container was deleted on the coordinator."


class OutOfRangeError(WorkbenchError):
    """A per-worker dataset ended while a closure asked for its next batch (T7.5)."""


class UnavailableError(ClusterError):
    """A task of the cluster does not answer.

    Attributes:
        job: "worker" or "ps". A worker's death is recovered from, a server's ends training (T10.1, T10.2).
        index: of the task.
    """

    def __init__(self, job: Job, index: int, why: str = "its process is gone") -> None:
        super().__init__(job, index, why)  # these three make it again where it was pickled
        self.job: Job = job
        self.index = index
        self.why = why

    def __str__(self) -> str:
        """Name the task, and what can be done."""
        if self.job == "worker":
            return f"worker {self.index} does not answer: {self.why}. Its closure is put back and runs elsewhere."
        return (
            f"ps {self.index} does not answer: {self.why}. What it held is lost: start the coordinator again, which "
            "goes on from the newest checkpoint."
        )
