"""`workbench ps`: one command for every task of a parameter-server cluster."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from workbench.cli.commands import RAN
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver


def serve(args: argparse.Namespace) -> int:
    """Be one task of a cluster until the chief is done."""
    from workbench.parameter_server.program import become_script, follow_trial, run_task, train_trial

    resolver = _resolver(args)
    chief = evaluator = _nothing
    if resolver.role in ("chief", "evaluator") and args.script is not None:
        if not Path(args.script).is_file():
            raise UsageError(f"--script {args.script}: there is no such file.")
        chief = evaluator = partial(become_script, resolver, Path(args.script), args.rest)
    elif resolver.role in ("chief", "evaluator"):
        if len(args.rest) != 1:
            raise UsageError(
                f"the {resolver.role} needs one WORKLOAD, or --script FILE with its own arguments behind --; given: "
                f"{shlex.join(args.rest) or 'nothing'}."
            )
        if args.steps is not None and args.steps < 1:
            raise UsageError(f"--steps {args.steps} must be at least 1; leave it out for the workload's own.")
        (workload,) = args.rest
        out = Path(args.out or f"runs/{Path(workload).name.rpartition(':')[2]}-ps")
        chief = partial(train_trial, resolver, workload, out, steps=args.steps, wait_s=args.wait)
        evaluator = partial(follow_trial, workload, out, steps=args.steps, wait_s=args.wait)
    # As Ctrl-C does: what runs the tasks of a cluster ends one like this, and others have to be told.
    before = signal.signal(signal.SIGTERM, _as_ctrl_c)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("workbench.parameter_server.cluster").setLevel(logging.INFO)
    try:
        run_task(resolver, chief=chief, evaluator=evaluator, wait_s=args.wait)
    except KeyboardInterrupt:
        if resolver.role in ("worker", "ps"):
            raise KeyboardInterrupt(f"{resolver.task} has left the cluster.") from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return RAN


def _as_ctrl_c(_: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does now: a trainer finishes its step and saves everything. Background jobs of a shell ignore Ctrl-C, but not this."""
    does = signal.getsignal(signal.SIGINT)
    if callable(does):
        does(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt


def _nothing() -> None:
    """What a worker or server does as chief: it is none."""


def _resolver(args: argparse.Namespace) -> ClusterResolver:
    from workbench.parameter_server.cluster.cluster_resolver import VARIABLES, ClusterResolver
    from workbench.parameter_server.cluster.cluster_spec import Task

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
