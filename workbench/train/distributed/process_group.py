"""`HostGroup`: the ranks that train one model together, each with its own share of every batch, and the few things that they say to each other.

A process that was started alone is a group of one, for which all of this costs nothing.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench import errors
from workbench.errors import UsageError, WorkbenchError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class HostGroup:
    """The group of `size` ranks as rank `rank` sees it."""

    def __init__(self, rank: int = 0, size: int = 1, *, messages: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = rank, size
        self._messages = messages  # bytes travel through host memory, whatever gradients do

    @property
    def main(self) -> bool:
        """Whether this is the one that writes records and checkpoints (P7.2)."""
        return self.rank == 0

    def sum_and_gather(self, summed: Tensor, gathered: Tensor) -> Tensor:
        """Add `summed` up over all ranks, in place, and return everybody's `gathered`, shape (ranks, ...): one exchange.

        What is gathered travels at the end of what is summed: each rank writes its bytes, one number each, to places where the
        others have zeros. A byte is exact in every floating-point type from bfloat16 on.

        Args:
            summed: shape (numbers,); the last `room(gathered)` of them are overwritten.
            gathered: contiguous, of the same shape and type on all ranks.
        """
        content = gathered.reshape(-1).view(torch.uint8)
        rows = summed[len(summed) - self.room(gathered) :].view(self.size, len(content)).zero_()
        rows[self.rank] = content
        dist.all_reduce(summed)
        return rows.to(torch.uint8).view(gathered.dtype).view(self.size, *gathered.shape)

    def room(self, gathered: Tensor) -> int:
        """Return how many numbers everybody's `gathered` takes at the end of what is summed."""
        return self.size * gathered.numel() * gathered.element_size()

    def gather(self, value: Any) -> list[Any]:
        """Return everybody's `value`, in the order of the ranks."""
        if self.size == 1:
            return [value]
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self._messages)
        return found

    def from_main(self, value: Any) -> Any:
        """Return the value of the main rank; what the others give does not count."""
        found = [value]
        if self.size > 1:
            dist.broadcast_object_list(found, 0, group=self._messages)
        return found[0]

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Do `work` on the main rank and return its result on all of them; what it raises is raised on all."""
        if self.size == 1:
            return work()
        answer: dict[str, Any] = {}
        failure: Exception | None = None
        if self.main:
            try:
                answer = {"value": work()}
            except Exception as error:
                failure = error
                answer = {"error": type(error).__name__, "message": str(error)}
        answer = self.from_main(answer)
        if failure is not None:
            raise failure
        if "error" in answer:
            kind = getattr(errors, answer["error"], WorkbenchError)
            raise kind(answer["message"]) from None
        return answer["value"]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return flag if self.size == 1 else any(self.gather(flag))


ALONE = HostGroup()  # A process that trains by itself


@contextmanager
def host_group(device: torch.device) -> Iterator[HostGroup]:
    """Join the other processes that torchrun started, for the time of the block; alone, there is nobody to join.

    A process group that exists already is used and left. Gradients travel by NCCL between GPUs and by gloo elsewhere.
    """
    if dist.is_available() and dist.is_initialized():
        yield _joined()
        return
    if int(os.environ.get("WORLD_SIZE") or 1) <= 1:
        yield ALONE
        return
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that several processes train together, and {', '.join(missing)} is "
            "not set. Start them with torchrun --nproc-per-node N script.py, or unset WORLD_SIZE to train alone."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=_store(), rank=rank, world_size=size)
    yield _joined()
    dist.destroy_process_group()  # not after an error: the others may wait for this one, and torchrun ends them


def check_alone(what: str) -> None:
    """Raise `UsageError` where this process, which has to do `what`, is one of several that torchrun started."""
    size = os.environ.get("WORLD_SIZE") or "1"
    if size != "1":
        raise UsageError(
            f"{what} is run by one process, and this is one of WORLD_SIZE={size} that were started together. Run it with "
            "python instead of torchrun, its trials side by side with executor='ray'; what many processes can train "
            "together is one trial, Trainer().run(...)."
        )


def local_device(device: torch.device) -> torch.device:
    """Return the GPU of this process where several of one machine train together, each on one; else `device` itself."""
    if str(device) != "cuda":
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0) % max(torch.cuda.device_count(), 1))


def _store() -> Any:
    """Return where the ranks find each other.

    torchrun's store outlives a restart, with the addresses of dead processes in it: each attempt needs names of its own
    (pytorch/pytorch#135712).
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    main = os.environ["RANK"] == "0" and not agent
    store = dist.TCPStore(address, port, is_master=main, multi_tenant=not agent)  # type: ignore[attr-defined]
    return dist.PrefixStore(  # type: ignore[attr-defined]
        f"workbench/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT') or 0}", store
    )


def _joined() -> HostGroup:
    size = dist.get_world_size()
    if size == 1:
        return ALONE
    messages = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return HostGroup(dist.get_rank(), size, messages=messages)
