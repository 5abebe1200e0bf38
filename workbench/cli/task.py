"""`workbench ps`: this process becomes a task of a cluster."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.commands import RAN
from workbench.cli.signals import ended_like_ctrl_c
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver


def serve(args: argparse.Namespace) -> int:
    """Be one task of a cluster until the chief is done."""
    from workbench.parameter_server.program import become_script, follow_trial, run_task, train_trial
    from workbench.record.folder import runs_root

    resolver = _resolver(args)
    chief = evaluator = _nothing
    if resolver.role in ("chief", "evaluator") and args.script is not None:
        if not Path(args.script).is_file():
            raise UsageError(f"--script {args.script}: there is no such file.")
        chief = evaluator = partial(become_script, resolver, Path(args.script), args.rest)
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
        chief = partial(train_trial, resolver, workload, out, steps=args.steps, wait_s=args.wait)
        evaluator = partial(follow_trial, workload, out, steps=args.steps, wait_s=args.wait)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("workbench.parameter_server.cluster").setLevel(logging.INFO)
    try:
        with ended_like_ctrl_c():  # what runs the tasks of a cluster ends one like this, and others have to be told
            run_task(resolver, chief=chief, evaluator=evaluator, wait_s=args.wait)
    except KeyboardInterrupt:
        if resolver.role in ("worker", "ps"):
            raise KeyboardInterrupt(f"{resolver.task} has left the cluster.") from None
        raise
    return RAN


def _nothing() -> None:
    """What a worker or server does as chief: it is none."""


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
