"""`run_task`: the one program of all roles: a worker and a server serve, the chief trains, the evaluator follows (T9.5)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.errors import ClusterError
from workbench.parameter_server.cluster.cluster import connect_to_cluster, serve_task
from workbench.parameter_server.cluster.cluster_resolver import VARIABLES, ClusterResolver


def run_task(
    resolver: ClusterResolver, *, chief: Callable[[], None], evaluator: Callable[[], None], wait_s: float = 300.0
) -> None:
    """Do what this process is for, and return when that is done; the evaluator never joins the cluster (T1.10).

    Raises:
        UsageError: nobody said which task this is; it is not taken for the coordinator (T9.5).
    """
    if resolver.role in ("worker", "ps"):
        serve_task(resolver, wait_s=wait_s)
    else:
        (chief if resolver.role == "chief" else evaluator)()


def train_trial(
    resolver: ClusterResolver, workload: str, out: Path, *, steps: int | None = None, wait_s: float = 300.0
) -> None:
    """Train a workload on the cluster and leave the record of it in `out`; the same call goes on after a failure (T10.4)."""
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


def follow_trial(workload: str, out: Path, *, steps: int | None = None, wait_s: float = 300.0) -> None:
    """Evaluate every checkpoint that `train_trial` writes into `out`, until the last (T8.6, T8.7)."""
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


def become_script(resolver: ClusterResolver, script: Path, arguments: Sequence[str]) -> None:
    """Replace this process by a script of the user's own, which finds the description of the cluster in WORKBENCH_CLUSTER."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment[VARIABLES[0]] = resolver.to_json()
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, str(script), *arguments], environment)
