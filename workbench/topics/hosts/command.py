"""`rehearse`: what `workbench hosts` does: run on several processes, judge, and keep the verdicts beside the facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.findings.diagnosis import Diagnosis, Status
from workbench.record.json_values import dumps
from workbench.record.parts import write_atomic
from workbench.topics.hosts.diagnose import diagnose_hosts
from workbench.topics.hosts.diagnose_area import host_areas
from workbench.topics.hosts.study import HostsStudy, audit_script
from workbench.workloads.registry import load_workload

__all__ = ["rehearse"]


def rehearse(
    target: str,
    *,
    arguments: Sequence[str] | None = None,
    hosts: int = 4,
    steps: int | None = None,
    timeout_s: float = 60.0,
    port: int | None = None,
    out: str | Path | None = None,
    command: str | None = None,
) -> tuple[Diagnosis, dict[str, Status]]:
    """Rehearse a workload or a script on many hosts, and return the verdicts and those of the five areas (P7.1).

    Args:
        target: name of a workload, or path of a script where `arguments` are given.
        arguments: of the script; None rehearses a workload.
        hosts: processes.
        steps: updates; None is 50 for a workload, and all of a script.
        timeout_s: without progress on any rank.
        port: on which the ranks meet; None is a free one.
        out: folder of the study; None is a new one under `runs/`.
        command: what reproduces it.

    Raises:
        UsageError: an argument is out of its range.
        ClusterError: the port is taken, a rank died, or nothing moved for `timeout_s`.
    """
    shared: dict[str, Any] = {"hosts": hosts, "timeout_s": timeout_s, "port": port}
    record: Any
    if arguments is None:
        study = HostsStudy(steps=50 if steps is None else steps, **shared)
        record = study.run(load_workload(target), out, command=command)
    else:
        record = audit_script(target, arguments, steps=steps, out=out, command=command, **shared)
    seconds = float(record.facts["hosts"]["seconds"])
    found = diagnose_hosts(record)
    diagnosis = dataclasses.replace(found, cost={"hosts": hosts, "seconds": seconds})
    areas = host_areas(diagnosis)
    assert diagnosis.path is not None
    write_atomic(diagnosis.path / "diagnosis.json", dumps(diagnosis.to_dict() | {"areas": areas}).encode())
    return diagnosis, areas
