"""`ClusterSpec`: which tasks a cluster has and where each listens; `Task`: one of them (T1.5, T1.7 to T1.12)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from workbench.errors import UnknownNameError, UsageError

TaskType = Literal["chief", "worker", "ps", "evaluator"]
TASK_TYPES: tuple[str, ...] = get_args(TaskType)
JOBS = ("chief", "worker", "ps")
_MEANT = {"coordinator": "chief", "master": "chief", "workers": "worker", "server": "ps", "parameter_server": "ps"}


@dataclass(frozen=True)
class Task:
    """One process of a cluster.

    Attributes:
        type: "chief" (the coordinator, so called for historical reasons), "worker", "ps" or "evaluator" (T1.11).
        index: among the tasks of its type, from 0.
    """

    type: TaskType
    index: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no task.

        Raises:
            UnknownNameError: no such type; it is never taken for the coordinator's (T9.5).
            UsageError: the index is no number from 0, or not 0 where there is one such task at most.
        """
        if self.type not in TASK_TYPES:
            raise UnknownNameError(
                f"Unrecognized task type {self.type!r}.{_hint(self.type)} Allowed: {', '.join(TASK_TYPES)}. Give the type "
                "of this process; none is guessed."
            )
        if isinstance(self.index, bool) or not isinstance(self.index, int) or self.index < 0:
            raise UsageError(f"index={self.index!r} of the {self.type} task must be an integer of at least 0.")
        if self.index and self.type in ("chief", "evaluator"):
            raise UsageError(
                f"index={self.index} of the {self.type} task must be 0: a cluster has one {self.type} at most."
            )

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


@dataclass(frozen=True)
class ClusterSpec:
    """The addresses of all tasks of a training cluster.

    The evaluator is none of them: the coordinator does not know its address (T1.8), it need not know theirs, and never
    connects to them (T1.10).

    Attributes:
        worker: "host:port" of each worker, one at least.
        ps: "host:port" of each parameter server, one at least.
        chief: "host:port" of the coordinator; empty where the process that makes the cluster coordinates it.
    """

    worker: tuple[str, ...]
    ps: tuple[str, ...]
    chief: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check counts and addresses.

        Raises:
            UsageError: no worker, no parameter server, more than one coordinator, what is no address, or one given twice.
        """
        for job in JOBS:
            object.__setattr__(self, job, _addresses(job, getattr(self, job)))
        for job, meaning in (("worker", "computes the steps"), ("ps", "holds the variables")):
            if not getattr(self, job):
                raise UsageError(
                    f"the cluster has 0 tasks of type {job!r} and needs at least 1: a {job} {meaning}. "
                    f'Give "{job}": ["host:port", ...].'
                )
        if len(self.chief) > 1:
            raise UsageError(
                f"the cluster has {len(self.chief)} tasks of type 'chief' ({', '.join(self.chief)}); there must be at most "
                "1, the coordinator. Keep one."
            )
        _no_address_twice(self)

    @classmethod
    def from_dict(cls, jobs: Mapping[str, Sequence[str]]) -> ClusterSpec:
        """Build from `{"worker": [...], "ps": [...], "chief": [...]}`, the "cluster" part of TF_CONFIG.

        Raises:
            UsageError: as above; "Disallowed task type" where a job has another name.
        """
        if not isinstance(jobs, Mapping):
            raise UsageError(f"the cluster must map {', '.join(JOBS)} to lists of 'host:port', not be {jobs!r}.")
        if "evaluator" in jobs:
            raise UsageError(
                f"Disallowed task type 'evaluator' in the cluster ({_shown(jobs['evaluator'])}). An evaluator reads "
                "checkpoints only and never joins, so training would wait for it without end. Take it out, and start it "
                "as a process of its own with type 'evaluator' as its task."
            )
        for job in jobs:
            if job not in JOBS:
                raise UsageError(
                    f"Disallowed task type {job!r} in the cluster.{_hint(job)} Allowed: {', '.join(JOBS)}. "
                    "Rename it, or take it out."
                )
        return cls(**{job: jobs.get(job, ()) for job in JOBS})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, list[str]]:
        """Return what `from_dict` takes, without empty jobs."""
        return {job: list(getattr(self, job)) for job in JOBS if getattr(self, job)}

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task: the coordinator if it has an address, then workers, then parameter servers."""
        kinds: tuple[TaskType, ...] = ("chief", "worker", "ps")
        return tuple(Task(kind, index) for kind in kinds for index in range(len(getattr(self, kind))))

    def address(self, task: Task) -> str:
        """Return "host:port" of a task (T1.9).

        Raises:
            UsageError: the cluster has no such task.
        """
        known: tuple[str, ...] = () if task.type == "evaluator" else getattr(self, task.type)
        if task.index >= len(known):
            raise UsageError(
                f"this process is to be {task}, and the cluster has {_numbered(task.type, len(known))}. Add its address "
                f'to "{task.type}" of the cluster, or give another task.'
            )
        return known[task.index]


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port"; an IPv6 host stands in brackets.

    Raises:
        UsageError: it has another form, or the port is not 1 to 65535.
    """
    form = "Allowed: 'host:port', for example 'host1:2222' or '[::1]:2222', with a port of 1 to 65535."
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    odd = any(sign.isspace() or sign in "/@,[]" for sign in name) or (":" in name and not bracketed)
    if odd or not name or not (port.isascii() and port.isdigit()):
        raise UsageError(f"address={address!r} is not understood. {form}")
    if not 0 < int(port) < 65536:
        raise UsageError(f"address={address!r} has a port out of range. {form}")
    return host, int(port)


def devices_each(counts: Sequence[int]) -> int:
    """Return how many devices every worker has, once it is the same number everywhere (T1.12).

    Args:
        counts: devices of each worker, by its index.

    Raises:
        UsageError: they differ; the workers are named.
    """
    if len(set(counts)) != 1:
        said = ", ".join(f"worker {index}: {count}" for index, count in enumerate(counts)) or "no workers"
        raise UsageError(
            f"all workers must have the same number of devices ({said}), because a step may run on any of them. Hide the "
            "surplus devices with CUDA_VISIBLE_DEVICES, or leave the workers that lack some out."
        )
    return counts[0]


def _addresses(job: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(f'{job}={given!r} must be a list of addresses, as in ["host1:2222", "host2:2222"].')
    found = tuple(given)
    for index, address in enumerate(found):
        try:
            split_address(address)
        except UsageError as error:
            raise UsageError(f"{job} {index}: {error}") from None
    return found


def _no_address_twice(spec: ClusterSpec) -> None:
    owner: dict[tuple[str, int], Task] = {}
    for task in spec.tasks:
        host, port = split_address(spec.address(task))
        first = owner.setdefault((host.lower(), port), task)
        if first is not task:
            raise UsageError(
                f"{first} and {task} have the same address {spec.address(task)!r}, and only one of them can listen there. "
                "Give each task a port of its own."
            )


def _hint(name: Any) -> str:
    meant = _MEANT.get(str(name).lower()) or (str(name).lower() if str(name).lower() in TASK_TYPES else None)
    return f" Did you mean {meant!r}?" if meant else ""


def _shown(given: Any) -> str:
    return given if isinstance(given, str) or not isinstance(given, Iterable) else ", ".join(map(str, given))


def _numbered(job: str, count: int) -> str:
    return {0: f"no {job}", 1: f"{job} 0 only"}.get(count, f"{job} 0 to {count - 1}")
