"""`connect_to_cluster`: the coordinator's way to workers and servers on other machines (T3.1, T9)."""

from __future__ import annotations

import atexit
import json
import logging
import sys
import time
import uuid
import weakref
from collections.abc import Sequence

from workbench.errors import ClusterError, UsageError
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver
from workbench.parameter_server.cluster.cluster_spec import Task
from workbench.parameter_server.cluster.serve_task import DESCRIPTION, chief_address, offered
from workbench.parameter_server.engines.ray_engine import RayEngine
from workbench.parameter_server.links.ways import Plane
from workbench.ray.cluster import RayCluster
from workbench.ray.node import RayNode

POLL_S = 0.2


def connect_to_cluster(
    where: ClusterResolver | str | None = None,
    *,
    num_workers: int | None = None,
    num_ps: int | None = None,
    data_plane: Plane = "auto",
    wait_s: float = 300.0,
) -> Cluster:
    """Return the cluster whose coordinator this process is.

    As a context manager it tells the other processes at the end that all is done, and they end too. Left by an error, or killed,
    it leaves them waiting for the next coordinator.

    Args:
        where: a description of the cluster, in which this is the chief: the tasks run where `serve_task` or `workbench ps` was started.
            Or "host:port" of a Ray cluster that is there ("auto" for the one on this machine), which chooses the machines itself and
            stays as it was. None reads WORKBENCH_CLUSTER or TF_CONFIG.
        num_workers: with the address of a Ray cluster: at least 1. A description says so itself.
        num_ps: likewise.
        data_plane: how values travel; see `RayEngine`.
        wait_s: for every task to be there.

    Raises:
        UsageError: this process is another task, or the numbers are missing, or given twice.
        ClusterError: tasks did not come in time (they are named), or the Ray cluster does not answer.
    """
    if isinstance(where, str):
        if num_workers is None or num_ps is None:
            raise UsageError(
                f"connect_to_cluster({where!r}) needs num_workers and num_ps: a Ray cluster does not say how many of its "
                "processes are to be which."
            )
        identity = uuid.uuid4().hex
        return Cluster(RayEngine(num_workers, num_ps, cluster=identity, data_plane=data_plane, address=where), identity)
    if num_workers is not None or num_ps is not None:
        raise UsageError(
            "num_workers and num_ps are for the address of a Ray cluster; a description of the cluster has its own."
        )
    resolver = where if where is not None else ClusterResolver.from_environment()
    if resolver.role != "chief":
        does = (
            "calls serve_task()"
            if resolver.role in ("worker", "ps")
            else "reads checkpoints and never joins (SidecarEvaluator)"
        )
        raise UsageError(f"{resolver.source}: this process is {resolver.task}, which {does}; only the chief connects.")
    spec = resolver.cluster_spec
    assert spec is not None
    node = RayNode.start(*chief_address(resolver), "workbench-chief")
    try:
        node.write(DESCRIPTION, json.dumps(spec.to_dict()))
        ray = node.connect()
        try:
            _wait(ray, [task for task in spec.tasks if task.type != "chief"], resolver, wait_s)
            identity = uuid.uuid4().hex
            engine = RayEngine(
                len(spec.worker), len(spec.ps), cluster=identity, data_plane=data_plane, ray=ray, resource=offered
            )
        except BaseException:
            ray.close()
            raise
    except BaseException:
        node.close()
        raise

    def leave(done: bool) -> None:
        try:
            if done:
                node.say_ended()
        finally:
            node.close()

    cluster = Cluster(engine, identity, leave=leave)
    atexit.register(_at_exit, weakref.ref(cluster))
    return cluster


def _wait(ray: RayCluster, tasks: Sequence[Task], resolver: ClusterResolver, wait_s: float) -> None:
    """Wait until every task is there."""
    until = time.monotonic() + wait_s
    assert resolver.cluster_spec is not None
    told: list[Task] = []
    while True:
        missing = [task for task in tasks if not ray.total(offered(task.type, task.index))]  # type: ignore[arg-type]
        if missing != told:
            logging.getLogger(__name__).info(
                "chief: waiting for %s, up to %g s", ", ".join(map(str, missing)) or "nobody", wait_s
            )
            told = missing
        if not missing:
            return
        if time.monotonic() > until:
            said = ", ".join(f"{task} at {resolver.cluster_spec.address(task)}" for task in missing)
            raise ClusterError(
                f"{len(missing)} of {len(tasks)} tasks did not come within {wait_s:g} s: {said}. Is `workbench ps` running there, with "
                "the same description of the cluster and the same token, and what does it print?"
            )
        time.sleep(POLL_S)


def _at_exit(cluster_of: weakref.ref[Cluster]) -> None:
    """End a cluster that nobody ended; after an error that nobody caught the others wait for the next coordinator."""
    cluster = cluster_of()
    if cluster is not None:
        cluster.shutdown(done=not hasattr(sys, "last_value"))
