"""What goes wrong in a cluster of workers and parameter servers: who failed, and what became of a closure."""

from dataclasses import dataclass
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


@dataclass(eq=False)
class NotHeldError(ClosureInputError):
    """The worker of this index does not hold what a closure needs, by the id of the resource."""

    worker: int
    resource: int

    def __str__(self) -> str:
        """Say what is missing, and why."""
        return f"Worker {self.worker} does not hold resource {self.resource}: its container was deleted on the coordinator."


@dataclass(eq=False)
class GivenUpError(ClusterError):
    """A function cost every worker that ran it its life."""

    function: str
    workers: list[int]  # those that died, in order

    def __str__(self) -> str:
        """Name it, and say what ends a process."""
        return (
            f"{self.function} was given up: {len(self.workers)} workers died while they ran it (workers {', '.join(map(str, self.workers))}). A "
            "crash in native code, os._exit or too little memory ends a process so: run it in this process, or look at the workers' logs. "
            "Where machines are taken away often, ClusterCoordinator(max_attempts=...) lets it try longer."
        )


class NonFiniteError(WorkbenchError):
    """A gradient is NaN or infinite: it would make every value on the servers so, and was not sent."""


def refuse(error: Exception) -> None:
    """Raise it: what is made in place of what cannot be."""
    raise error


class OutOfRangeError(WorkbenchError):
    """A per-worker dataset ended while a closure asked for its next batch (T7.5)."""


@dataclass(eq=False)
class UnavailableError(ClusterError):
    """A task of the cluster does not answer: a worker's death is recovered from, that of a "ps" ends training (T10.1, T10.2)."""

    job: Job
    index: int
    why: str = "its process is gone"

    def __str__(self) -> str:
        """Name the task, and what can be done."""
        if self.job == "worker":
            return f"worker {self.index} does not answer: {self.why}. Its closure is put back and runs elsewhere."
        return (
            f"ps {self.index} does not answer: {self.why}. What it held is lost. Trials go on from their newest checkpoint, fit "
            "with BackupAndRestore from its backup, and a loop of your own by CheckpointManager.recover."
        )
