"""`self_test_hosts`: an audit that finds nothing proves little, so bugs are planted where it has to find them (P7.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import UnknownNameError, nearest
from workbench.findings.diagnosis import Diagnosis
from workbench.record.folder import default_folder
from workbench.topics.hosts.diagnose import diagnose_hosts
from workbench.topics.hosts.diagnose_area import host_areas
from workbench.topics.hosts.launch import launch
from workbench.topics.hosts.planted import BUGS
from workbench.topics.hosts.self_test import HEALTHY, facts_folder
from workbench.topics.hosts.study import read_hosts

__all__ = ["self_test_hosts"]


def self_test_hosts(
    bugs: Sequence[str] | None = None, *, hosts: int = 2, out: str | Path | None = None, timeout_s: float = 60.0
) -> pd.DataFrame:
    """Plant one bug after the other in a small training on many hosts, and return what the audit says of each (P7.1).

    Args:
        bugs: names of `workbench.topics.hosts.planted.BUGS`; None is all of them. The training without a bug comes first.
        hosts: processes.
        out: folder of the facts; None is a new one under `runs/`.
        timeout_s: without progress.

    Returns:
        One row a bug: bug, logging, evaluation, RNG, checkpointing, sharding, and codes, those that are not "ok".

    Raises:
        UnknownNameError: a bug that cannot be planted.
    """
    chosen = list(BUGS) if bugs is None else list(bugs)
    for bug in chosen:
        if bug not in BUGS:
            raise UnknownNameError(f"bug {bug!r} is not known.{nearest(bug, BUGS)}")
    folder = default_folder("planted", "hosts") if out is None else Path(out)
    names = [HEALTHY, *chosen]
    launch(
        ["-m", "workbench.topics.hosts.self_test", str(folder.resolve()), *names], hosts=hosts, folder=folder, timeout_s=timeout_s,
        what="the self-test",
    )  # fmt: skip
    return pd.DataFrame([_row(name, diagnose_hosts(read_hosts(facts_folder(folder, name)))) for name in names])


def _row(bug: str, diagnosis: Diagnosis) -> dict[str, Any]:
    codes = ", ".join(f.code.removeprefix("hosts.") for f in diagnosis if f.status != "ok")
    return {"bug": bug, **host_areas(diagnosis), "codes": codes}
