"""`ClusterResolver`: who this process is and who else there is, from JSON in the shape of TF_CONFIG (T9.1 to T9.5)."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import UsageError
from workbench.parameter_server.cluster.cluster_spec import ClusterSpec, Task

VARIABLES = ("WORKBENCH_CLUSTER", "TF_CONFIG")
_EXAMPLE = '{"cluster": {"worker": ["host1:2222"], "ps": ["host2:2222"]}, "task": {"type": "worker", "index": 0}}'


@dataclass(frozen=True)
class ClusterResolver:
    """What a process knows about the cluster.

    Attributes:
        cluster_spec: addresses of the training cluster; None for an evaluator that was not told (T1.10, T9.4).
        task: this process; None where nobody said, as for a notebook that makes its own cluster.
        source: where this was read, in words.
    """

    cluster_spec: ClusterSpec | None = None
    task: Task | None = None
    source: str = "given in Python"

    def __post_init__(self) -> None:
        """Check that the task is one of the cluster.

        Raises:
            UsageError: it is not (T1.8), or it is no evaluator and has no cluster (T1.9).
        """
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
        """What this process is to do: "chief", "worker", "ps" or "evaluator".

        Raises:
            UsageError: nobody said; it is not taken for the coordinator then (T9.5).
        """
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

        Raises:
            UsageError: none is set, they disagree, or what is set cannot be understood.
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
        first = found[0]
        for other in found[1:]:
            if (first.cluster_spec, first.task) != (other.cluster_spec, other.task):
                raise UsageError(
                    f"{first.source} and {other.source} are both set and disagree: {_described(first)} against {_described(other)}. "
                    "Unset the one that is not meant for this program."
                )
        return first

    @classmethod
    def from_file(cls, path: str | Path, *, task: Task | None = None, source: str | None = None) -> ClusterResolver:
        """Read a file: YAML where its name ends in .yaml or .yml (this needs PyYAML), else JSON.

        One file serves all machines where each process is told its `task` apart.

        Raises:
            UsageError: it cannot be read or understood.
        """
        path, source = Path(path).expanduser(), source or str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{source}: cannot be read ({error}). Give the path of a JSON or YAML file.") from error
        if path.suffix.lower() not in (".yaml", ".yml"):
            return cls.from_json(text, task=task, source=source)
        return _resolved(_yaml(text, source), task, source)

    @classmethod
    def from_json(cls, text: str, *, task: Task | None = None, source: str = "the given JSON") -> ClusterResolver:
        """Read `{"cluster": {...}, "task": {"type": ..., "index": ...}}`; other keys, as templates add them, are skipped.

        Args:
            task: in place of the one that is written there.
            source: for messages.

        Raises:
            UsageError: this is no such JSON, or describes no cluster that could train.
        """
        try:
            config = json.loads(text, object_pairs_hook=_no_key_twice)
        except (json.JSONDecodeError, TypeError) as error:
            raise UsageError(f"{source}: this is no JSON ({error}): {str(text)[:60]!r}. Example: {_EXAMPLE}") from error
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None
        return _resolved(config, task, source)


def _resolved(config: Any, task: Task | None, source: str) -> ClusterResolver:
    if not isinstance(config, Mapping):
        raise UsageError(
            f"{source}: it must be an object with a cluster and a task, not {config!r}. Example: {_EXAMPLE}"
        )
    try:
        task = _task(config) if task is None else task
        spec = _cluster(config.get("cluster"), task)
    except UsageError as error:
        raise type(error)(f"{source}: {error}") from None
    return ClusterResolver(spec, task, source)


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


def _cluster(jobs: Any, task: Task) -> ClusterSpec | None:
    if task.type == "evaluator" and isinstance(jobs, Mapping):
        jobs = {job: addresses for job, addresses in jobs.items() if job != "evaluator"}  # its own address
    return ClusterSpec.from_dict(jobs) if jobs or (jobs is not None and task.type != "evaluator") else None


def _yaml(text: str, source: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise UsageError(f"{source}: reading YAML needs PyYAML. Install it, or write the same as JSON.") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(
            f"{source}: this is no YAML ({error}). Write the same as JSON, for example {_EXAMPLE}"
        ) from error


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UsageError(f"the key {twice!r} stands there twice, and one of its values would be lost. Join them.")
    return found


def _described(resolver: ClusterResolver) -> str:
    spec = resolver.cluster_spec
    return f"{resolver.task} in {spec.to_dict() if spec else 'no cluster'}"
