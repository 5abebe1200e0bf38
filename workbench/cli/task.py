"""`workbench ps`: this process becomes a task of a cluster."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.commands import RAN
from workbench.cli.signals import ended_like_ctrl_c
from workbench.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver


def serve(args: argparse.Namespace) -> int:
    """Be one task of a cluster until the chief is done."""
    from workbench.parameter_server.cluster.cluster import serve_task
    from workbench.record.folder import runs_root

    resolver = _resolver(args)
    work = partial(serve_task, resolver, wait_s=args.wait)
    if resolver.role in ("chief", "evaluator") and args.script is not None:
        if not Path(args.script).is_file():
            raise UsageError(f"--script {args.script}: there is no such file.")
        work = partial(_become_script, resolver, Path(args.script), args.rest)
    elif resolver.role in ("chief", "evaluator"):
        if len(args.rest) != 1:
            raise UsageError(
                f"the {resolver.role} needs one WORKLOAD, or --script FILE with its own arguments after --; given: "
                f"{shlex.join(args.rest) or 'nothing'}."
            )
        if args.steps is not None and args.steps < 1:
            raise UsageError(f"--steps {args.steps} must be at least 1; leave it out for the workload's own.")
        (workload,) = args.rest
        out = Path(args.out) if args.out else runs_root() / f"{Path(workload).name.rpartition(':')[2]}-ps"
        does = _train if resolver.role == "chief" else _follow  # who follows never joins the cluster (T1.10)
        work = partial(does, resolver, workload, out, steps=args.steps, wait_s=args.wait)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("workbench.parameter_server.cluster").setLevel(logging.INFO)
    try:
        with ended_like_ctrl_c():  # what runs the tasks of a cluster ends one like this, and others have to be told
            work()
    except KeyboardInterrupt:
        if resolver.role in ("worker", "ps"):
            raise KeyboardInterrupt(f"{resolver.task} has left the cluster.") from None
        raise
    return RAN


def _train(resolver: ClusterResolver, workload: str, out: Path, *, steps: int | None, wait_s: float) -> None:
    """Train a workload on the cluster and leave the record of it in `out`; the same call goes on after a failure (T10.4)."""
    from workbench.parameter_server.cluster.cluster import connect_to_cluster
    from workbench.parameter_server.training.trainer import ParameterServerTrainer
    from workbench.workloads.registry import load_workload

    made = load_workload(workload)
    config = made.config if steps is None else made.config.replace(total_steps=steps)
    with connect_to_cluster(resolver, wait_s=wait_s) as cluster:
        print(f"{cluster}", flush=True)
        record = ParameterServerTrainer(cluster=cluster).run(made, config, out=out, progress=True)
    best = record.best()
    print(f"{made.name}: {config.total_steps} updates; best {config.select} {best.value:.4g}, at update {best.step}.")
    print(f"Folder: {record.path}")


def _follow(_: ClusterResolver, workload: str, out: Path, *, steps: int | None, wait_s: float) -> None:
    """Evaluate every checkpoint that `_train` writes into `out`, until the last (T8.6, T8.7)."""
    from workbench.parameter_server.training.sidecar import SidecarEvaluator
    from workbench.workloads.registry import load_workload

    made = load_workload(workload)
    last = made.config.total_steps if steps is None else steps
    checkpoints, log_dir = out / "trials" / "0" / "checkpoints", out.with_name(f"{out.name}-evaluator")
    sidecar = SidecarEvaluator(made, checkpoints, steps=last, timeout_s=wait_s, log_dir=log_dir)
    print(f"following {checkpoints} until update {last}", flush=True)
    try:
        for found in sidecar:
            said = ", ".join(f"{name} {value:.4g}" for name, value in found.values.items())
            print(f"update {found.steps} of {last}: {said}", flush=True)
    except TimeoutError as error:
        raise ClusterError(f"{error} --wait says how long; --out and --steps have to be the chief's.") from error


def _become_script(resolver: ClusterResolver, script: Path, arguments: Sequence[str]) -> None:
    """Replace this process by a script of the user's own, which finds the description of the cluster in WORKBENCH_CLUSTER."""
    from workbench.parameter_server.cluster.cluster_resolver import VARIABLES

    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment[VARIABLES[0]] = resolver.to_json()
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, str(script), *arguments], environment)


def _resolver(args: argparse.Namespace) -> ClusterResolver:
    from workbench.parameter_server.cluster.cluster_resolver import VARIABLES, ClusterResolver, Task

    task = None
    if args.role != "auto":
        if args.index is None and args.role in ("worker", "ps"):
            raise UsageError(f"--role {args.role} needs --index N: which one of them this process is, from 0.")
        task = Task(args.role, args.index or 0)
    elif args.index is not None:
        raise UsageError(f"--index {args.index} needs --role worker or --role ps beside it.")
    if args.cluster is None and args.role == "evaluator" and not any(os.environ.get(name) for name in VARIABLES):
        return ClusterResolver(None, task, "--role evaluator")  # it needs no cluster (T1.10)
    if args.cluster is None:
        return ClusterResolver.from_environment(task=task)
    if args.cluster.lstrip().startswith("{"):
        return ClusterResolver.from_json(args.cluster, task=task, source="--cluster")
    return ClusterResolver.from_file(args.cluster, task=task, source=f"--cluster {args.cluster}")
