"""`HostsStudy`, `audit_script`, `audit_hosts`: a training on many ranks, rehearsed on this machine or watched where it runs."""

import atexit
import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.checks import check_integer
from workbench.config import TrainConfig, is_callable_name
from workbench.errors import UsageError, nearest
from workbench.findings.audited import Audit
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Status
from workbench.record.folder import default_folder, write_atomic, write_json
from workbench.record.json_values import dumps
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter
from workbench.studies.session import at_length
from workbench.topics.hosts.diagnose import diagnose_hosts, host_areas
from workbench.topics.hosts.launch import check_hosts, launch
from workbench.topics.hosts.watch import HostsWatch, read_facts
from workbench.topics.hosts.watch_state import rank_file
from workbench.train.distributed.data_parallel import check_shares
from workbench.train.distributed.process_group import HostGroup
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_workload
from workbench.workloads.registry import call_on, load_workload


@dataclass(frozen=True, kw_only=True)
class HostsStudy:
    """A workload trained on several processes of this machine, with every rank observed (P7).

    Attributes:
        hosts: processes, at least 2; more than this machine has cores works, and says nothing about speed.
        steps: updates; None is the baseline's.
        timeout_s: without progress on any rank, until the rehearsal is ended and the rank that stands still is named.
        port: on which the ranks meet, on the loopback interface; None is a free one.
    """

    hosts: int = 4
    steps: int | None = 50
    timeout_s: float = 60.0
    port: int | None = None

    def run(
        self, workload: Workload, out: str | Path | None = None, *, name: str | None = None, note: str | None = None,
        command: str | None = None,
    ) -> StudyRecord:  # fmt: skip
        """Train the workload on all ranks and return the record, whose facts hold what each rank did.

        Args:
            workload: what to train; loaded by its name, because other processes have to load it too.
            out: the study's folder; None is a new one under `runs/`.
            name: of the study; None is the folder's.
            note: a short description (P5.4); None writes one.
            command: what reproduces the study; None is this process's command line.

        Raises:
            UsageError: an argument is out of its range, or the workload cannot be trained on several ranks.
            ClusterError: the port is taken, a rank died, or nothing moved for `timeout_s`.
            RecordError: the folder cannot be used.
        """
        check_workload(workload)
        check_hosts(self.hosts)
        config = at_length(workload.config, self.steps)
        if workload.source is None:
            raise UsageError(
                f"workload {workload.name!r} was built in this process, and other processes cannot load it. Put it into a file and "
                "name it: load_workload('path/to/file.py:attribute')."
            )
        check_shares(config, HostGroup(size=self.hosts))
        writer = StudyWriter.open(
            None if out is None else Path(out), kind="hosts", workload=workload.name, config=config.to_dict(),
            settings={"hosts": self.hosts, "steps": self.steps}, name=name, note=note or f"{workload.name} on {self.hosts} ranks", command=command,
            call=call_on(workload, f"{self!r}.run({{workload}}, out={out and str(out)!r})"),
        )  # fmt: skip
        try:
            if "hosts" not in writer.record.facts:
                writer.add_facts(hosts=self._facts(workload, config, writer.path))
            writer.finish()
            return StudyRecord(writer.path)
        finally:
            writer.close()

    def _facts(self, workload: Workload, config: TrainConfig, path: Path) -> dict[str, Any]:
        fields = {key: value for key, value in config.to_dict().items() if not is_callable_name(value)}
        spec, trained = path / "rehearsal.json", str((path / "trained").resolve())
        write_atomic(spec, dumps({"workload": workload.source, "config": fields, "out": trained}).encode())
        target = ["-m", "workbench.topics.hosts.run_rank", "rehearsal", str(spec.resolve())]
        what = f"the rehearsal of {workload.name!r}"
        done = launch(target, hosts=self.hosts, folder=path, timeout_s=self.timeout_s, port=self.port, what=what)
        return done | read_facts(path)


def audit_script(
    script: str | Path, arguments: Sequence[str] = (), *, hosts: int = 4, steps: int | None = None, timeout_s: float = 60.0,
    port: int | None = None, out: str | Path | None = None, command: str | None = None,
) -> Audit:  # fmt: skip
    """Run a training script of your own, as it is, under torchrun on this machine, and observe every rank.

    The script is started as `torchrun --nproc-per-node HOSTS script.py ARGUMENTS` would start it. Nothing in it is changed: what is
    observed are calls of torch, and files that are opened for writing.

    Args:
        script: path of the script; it calls `init_process_group` as under torchrun.
        arguments: its own.
        hosts: processes, at least 2.
        steps: updates after which every rank ends; None runs the script to its end, with its evaluation and its checkpoint.
        timeout_s: without progress on any rank, until the run is ended and the rank that stands still is named.
        port: on which the ranks meet; None is a free one.
        out: folder of the facts; None is a new one under `runs/`.
        command: what reproduces it; None is a Python expression.

    Returns:
        What was seen; `diagnose_hosts` judges it.

    Raises:
        UsageError: there is no such script, or an argument is out of its range.
        ClusterError: the port is taken, a rank died, or nothing moved for `timeout_s`.
    """
    path = Path(script)
    if not path.is_file():
        there = sorted(p.name for p in path.resolve().parent.glob("*.py"))
        hint = nearest(path.name, there) if there else " That folder has no .py files, or is not there."
        raise UsageError(f"there is no script {str(script)!r}.{hint}")
    if steps is not None:
        check_integer("steps", steps, hint=", or None to run the script to its end", error=UsageError)
    check_hosts(hosts)
    folder = default_folder(path.stem, "hosts") if out is None else Path(out)
    target = [str(path.resolve()), *arguments]
    done = launch(target, hosts=hosts, folder=folder, timeout_s=timeout_s, port=port, what=path.name, steps=steps)
    facts = done | read_facts(folder)
    words = ["workbench", "hosts", "--script", str(script), "--hosts", str(hosts), "--", *arguments]
    audit = Audit(facts={"hosts": facts}, workload=path.name, command=command or shlex.join(words), path=folder)
    shown = {"hosts": {k: v for k, v in facts.items() if k != "ranks"}, "workload": path.name, "command": audit.command}
    write_atomic(folder / "hosts.json", dumps(shown).encode())
    return audit


def audit_hosts(
    out: str | Path = "runs/hosts", *, timeout_s: float | None = None, wait_s: float = 10.0, report: bool = True
) -> HostsWatch:
    """Observe this process, one rank of a training job, from here to its end: one line near the top of your own script.

    Call it on every rank, before the model, the loader and the process group are made. When the process ends, each rank writes its
    facts, and the first rank waits for the others', prints the verdicts, and keeps them in `diagnosis.json`.

    Args:
        out: a folder that all ranks can write to.
        timeout_s: without progress, until the stack of this rank is written into the folder; None is never.
        wait_s: for the other ranks' facts, at the end.
        report: print the verdicts on the first rank; False only writes the facts, which `read_hosts` reads.

    Returns:
        The watch; its `close()` ends it earlier, and it is a context manager.
    """
    watch = HostsWatch(Path(out), timeout_s=timeout_s)
    atexit.register(_at_the_end, watch, wait_s, report)
    return watch


def _at_the_end(watch: HostsWatch, wait_s: float, report: bool) -> None:
    watch.close()
    state = watch.state
    if not report or state.rank or not state.here:
        return
    until, files = time.monotonic() + wait_s, [rank_file(state.folder, "rank", rank) for rank in range(state.world)]
    while time.monotonic() < until and not all(file.exists() for file in files):
        time.sleep(0.05)
    diagnosis = diagnose_hosts(read_hosts(state.folder))
    write_json(state.folder / "diagnosis.json", diagnosis.to_dict())
    areas = [f"  {area}: {status}" for area, status in host_areas(diagnosis).items()]
    print(diagnosis, *areas, sep="\n", file=sys.stderr)


def read_hosts(folder: str | Path) -> Audit:
    """Return what the ranks of a job wrote into a folder, for `diagnose_hosts`.

    Raises:
        UsageError: the folder holds no facts.
    """
    path = Path(folder)
    found = read_facts(path)
    if not found["ranks"]:
        none = "holds no facts of ranks (rank-0.json ...)"
        raise UsageError(f"folder={str(folder)!r} {none}: call wb.hosts.audit() in the job, or give another.")
    return Audit(facts={"hosts": found}, workload=path.name, path=path)


def rehearse(
    target: str, *, arguments: Sequence[str] | None = None, hosts: int = 4, steps: int | None = None, timeout_s: float = 60.0,
    port: int | None = None, out: str | Path | None = None, command: str | None = None,
) -> tuple[Diagnosis, dict[str, Status]]:  # fmt: skip
    """Rehearse a workload (50 steps by default) or, where `arguments` are given, a script; return the verdicts and those of the five areas (P7.1)."""
    shared: dict[str, Any] = {"hosts": hosts, "timeout_s": timeout_s, "port": port}
    record: Any
    if arguments is None:
        study = HostsStudy(steps=50 if steps is None else steps, **shared)
        record = study.run(load_workload(target), out, command=command)
    else:
        record = audit_script(target, arguments, steps=steps, out=out, command=command, **shared)
    seconds = float(record.facts["hosts"]["seconds"])
    diagnosis = dataclasses.replace(diagnose_hosts(record), cost={"hosts": hosts, "seconds": seconds})
    areas = host_areas(diagnosis)
    assert diagnosis.path is not None
    write_json(diagnosis.path / "diagnosis.json", diagnosis.to_dict() | {"areas": areas})
    return diagnosis, areas
