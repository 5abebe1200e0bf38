"""Which tasks a cluster has and where each listens, and which of them this process is, from JSON like TF_CONFIG (T1.5 to T1.12, T9.1 to T9.5)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from workbench.checks import check_integer
from workbench.errors import UnknownNameError, UsageError

TaskType = Literal["chief", "worker", "ps", "evaluator"]
TASK_TYPES: tuple[str, ...] = get_args(TaskType)
JOBS: tuple[TaskType, ...] = ("chief", "worker", "ps")
VARIABLES = ("WORKBENCH_CLUSTER", "TF_CONFIG")
_EXAMPLE = '{"cluster": {"worker": ["host1:2222"], "ps": ["host2:2222"]}, "task": {"type": "worker", "index": 0}}'
_MEANT = {"coordinator": "chief", "master": "chief", "workers": "worker", "server": "ps", "parameter_server": "ps"}


@dataclass(frozen=True)
class Task:
    """One process of a cluster; an unknown type is never taken for the coordinator's (T9.5).

    Raises:
        UsageError: no such type, or an index that is no number from 0, or not 0 where there is one such task at most.
    """

    type: TaskType  # "chief" is the coordinator, so called for historical reasons (T1.11)
    index: int = 0  # among the tasks of its type

    def __post_init__(self) -> None:
        """Check."""
        if self.type not in TASK_TYPES:
            raise UnknownNameError(
                f"Unrecognized task type {self.type!r}.{_suggestion(self.type)} Allowed: {', '.join(TASK_TYPES)}. Give the type "
                "of this process; none is guessed."
            )
        check_integer(f"{self.type} index", self.index, low=0, error=UsageError)
        if self.index and self.type in ("chief", "evaluator"):
            raise UsageError(f"{self.type} index={self.index} must be 0: a cluster has one {self.type} at most.")

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


@dataclass(frozen=True)
class ClusterSpec:
    """The addresses of all tasks of a training cluster, of which an evaluator is none: it never connects (T1.8, T1.10).

    Raises:
        UsageError: no worker, no parameter server, more than one coordinator, what is no address, or one given twice.
    """

    worker: tuple[str, ...]  # "host:port" of each
    ps: tuple[str, ...]
    chief: tuple[str, ...] = ()  # none where the process that makes the cluster coordinates it

    def __post_init__(self) -> None:
        """Check counts and addresses."""
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
        owner: dict[tuple[str, int], Task] = {}
        for task in self.tasks:
            host, port = split_address(self.address(task))
            first = owner.setdefault((host.lower(), port), task)
            if first is not task:
                raise UsageError(
                    f"{first} and {task} have the same address {self.address(task)!r}, and only one of them can listen there. "
                    "Give each task a port of its own."
                )

    @classmethod
    def from_dict(cls, jobs: Mapping[str, Sequence[str]]) -> ClusterSpec:
        """Build from `{"worker": [...], "ps": [...], "chief": [...]}`, the "cluster" part of TF_CONFIG."""
        if not isinstance(jobs, Mapping):
            raise UsageError(f"the cluster must map {', '.join(JOBS)} to lists of 'host:port', not be {jobs!r}.")
        if "evaluator" in jobs:
            raise UsageError(
                f"Disallowed task type 'evaluator' in the cluster ({jobs['evaluator']}). An evaluator reads "
                "checkpoints only and never joins, so training would wait for it without end. Take it out, and start it "
                "as a process of its own with type 'evaluator' as its task."
            )
        for job in jobs:
            if job not in JOBS:
                raise UsageError(
                    f"Disallowed task type {job!r} in the cluster.{_suggestion(job)} Allowed: {', '.join(JOBS)}. "
                    "Rename it, or take it out."
                )
        return cls(**{job: jobs.get(job, ()) for job in JOBS})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, list[str]]:
        """Return what `from_dict` takes, without empty jobs."""
        return {job: list(getattr(self, job)) for job in JOBS if getattr(self, job)}

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task: the coordinator if it has an address, then workers, then parameter servers."""
        return tuple(Task(job, index) for job in JOBS for index in range(len(getattr(self, job))))

    def address(self, task: Task) -> str:
        """Return "host:port" of a task (T1.9); raises `UsageError` where the cluster has no such task."""
        known: tuple[str, ...] = () if task.type == "evaluator" else getattr(self, task.type)
        if task.index >= len(known):
            raise UsageError(
                f"this process is to be {task}, and the cluster has {len(known)} of type {task.type!r}. Add its address "
                f'to "{task.type}" of the cluster, or give another task.'
            )
        return known[task.index]


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port", with an IPv6 host in brackets; raises `UsageError` where it has another form."""
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


@dataclass(frozen=True)
class ClusterResolver:
    """What a process knows about the cluster.

    Raises:
        UsageError: the task is none of the cluster (T1.8), or is no evaluator and has no cluster (T1.9).
    """

    cluster_spec: ClusterSpec | None = None  # None for an evaluator that was not told (T1.10, T9.4)
    task: Task | None = None  # this process; None where nobody said, as for a notebook that makes its own cluster
    source: str = "given in Python"  # where this was read, in words

    def __post_init__(self) -> None:
        """Check that the task is one of the cluster."""
        if self.task is None or self.task.type == "evaluator":
            return
        if self.cluster_spec is None:
            raise UsageError(
                f'{self.source}: {self.task} needs the "cluster" part, to know which port to listen on and whom to answer. '
                f"Only an evaluator goes without. Example: {_EXAMPLE}"
            )
        try:
            self.cluster_spec.address(self.task)
        except UsageError as error:
            raise UsageError(f"{self.source}: {error}") from None

    @property
    def role(self) -> str:
        """What this process is to do: "chief", "worker", "ps" or "evaluator"; `UsageError` where nobody said (T9.5)."""
        if self.task is None:
            raise UsageError(
                f"{self.source}: it is not said which task this process is. Give --role worker --index 0, or a "
                f'"task" part. Example: {_EXAMPLE}'
            )
        return self.task.type

    @property
    def address(self) -> str | None:
        """ "host:port" that this process listens on; None for the evaluator."""
        if self.cluster_spec is None or self.task is None or self.task.type == "evaluator":
            return None
        return self.cluster_spec.address(self.task)

    @property
    def chief_address(self) -> tuple[str, int]:
        """Host and port at which the chief listens; raises `UsageError` where nobody said."""
        if self.cluster_spec is None or not self.cluster_spec.chief:
            raise UsageError(
                f'{self.source}: the cluster names no chief, and workers and servers meet where it listens. Add "chief": ["host:port"].'
            )
        return split_address(self.cluster_spec.chief[0])

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        found: dict[str, Any] = {} if self.cluster_spec is None else {"cluster": self.cluster_spec.to_dict()}
        if self.task is not None:
            found["task"] = {"type": self.task.type, "index": self.task.index}
        return json.dumps(found)

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, *, task: Task | None = None
    ) -> ClusterResolver:
        """Read WORKBENCH_CLUSTER or TF_CONFIG, whichever is set; a TF_CONFIG set by a template is respected (T9.2).

        WORKBENCH_CLUSTER may also name a file, which TF_CONFIG may not. Where both are set they have to say the same:
        neither outranks the other, because a process that takes the wrong one for its own joins the wrong cluster.

        Args:
            environment: the variables; None is those of this process.
            task: in place of the one that is written there.
        """
        environment = os.environ if environment is None else environment
        found = []
        for name in VARIABLES:
            value = environment.get(name, "").strip()
            if value and (name == "TF_CONFIG" or value.startswith("{")):
                found.append(cls.from_json(value, task=task, source=name))
            elif value:
                found.append(cls.from_file(value, task=task, source=f"{name}={value}"))
        if not found:
            raise UsageError(f"neither of {' and '.join(VARIABLES)} is set. Set one, for example to {_EXAMPLE}")
        first, last = found[0], found[-1]
        if (first.cluster_spec, first.task) != (last.cluster_spec, last.task):
            raise UsageError(
                f"{first.source} and {last.source} are both set and disagree: {first.to_json()} against {last.to_json()}. "
                "Unset the one that is not meant for this program."
            )
        return first

    @classmethod
    def from_file(cls, path: str | Path, *, task: Task | None = None, source: str | None = None) -> ClusterResolver:
        """Read a JSON file. One serves all machines where each process is told its `task` apart."""
        path, source = Path(path).expanduser(), source or str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{source}: cannot be read ({error}). Give the path of a JSON file.") from error
        return cls.from_json(text, task=task, source=source)

    @classmethod
    def from_json(cls, text: str, *, task: Task | None = None, source: str = "the given JSON") -> ClusterResolver:
        """Read `{"cluster": {...}, "task": {"type": ..., "index": ...}}`; other keys, as templates add them, are skipped.

        A `task` stands in place of the one that is written there; `source` is for messages. Raises `UsageError` where this is no such
        JSON, or describes no cluster that could train.
        """
        try:
            config = json.loads(text, object_pairs_hook=_no_key_twice)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{source}: this is no JSON ({error}): {str(text)[:60]!r}. Example: {_EXAMPLE}") from error
        if not isinstance(config, Mapping):
            raise UsageError(
                f"{source}: it must be an object with a cluster and a task, not {config!r}. Example: {_EXAMPLE}"
            )
        try:
            task = _task(config) if task is None else task
            jobs = config.get("cluster")
            if task.type == "evaluator" and isinstance(jobs, Mapping):
                jobs = {job: addresses for job, addresses in jobs.items() if job != "evaluator"}  # its own address
            spec = ClusterSpec.from_dict(jobs) if jobs or (jobs is not None and task.type != "evaluator") else None
        except UsageError as error:
            raise type(error)(f"{source}: {error}") from None
        return cls(spec, task, source)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {max(keys, key=keys.count)!r} stands there twice, and one value would be lost")
    return found


def _task(config: Mapping[str, Any]) -> Task:
    given = config.get("task")
    if not isinstance(given, Mapping) or "type" not in given:
        raise UsageError(
            f'the "task" part must say which task this process is, and is {given!r} (keys given: '
            f"{', '.join(map(str, config)) or 'none'}). Write it, or give --role and --index. Example: {_EXAMPLE}"
        )
    index = given.get("index", 0 if given["type"] in ("chief", "evaluator") else None)
    if isinstance(index, str) and index.isascii() and index.isdigit():
        index = int(index)  # some templates quote it
    return Task(given["type"], index)


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


def _suggestion(name: Any) -> str:
    lower = str(name).lower()
    meant = _MEANT.get(lower) or (lower if lower in TASK_TYPES else None)
    return f" Did you mean {meant!r}?" if meant else ""
