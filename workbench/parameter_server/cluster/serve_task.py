"""`serve_task`: what a worker or parameter server does as a process of its own: be there until all is done (T9.5, T9.6)."""

from __future__ import annotations

import json
import logging
import time

from workbench.errors import UsageError
from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver
from workbench.parameter_server.cluster.cluster_spec import split_address
from workbench.parameter_server.errors import Job
from workbench.ray.node import RayNode

DESCRIPTION = "cluster"  # under which the chief writes down what it takes for the cluster

POLL_S = 0.5
LOST = 4  # looks in a row without an answer before the chief counts as gone (rule of thumb)


def serve_task(resolver: ClusterResolver | None = None, *, wait_s: float = 300.0) -> None:
    """Offer this process to the cluster as the task that it is, and return when the chief says that all is done.

    Start it in any order with the others. Where the chief is gone without a word, because it was killed or its program failed,
    this waits for it to come again: what a server held is then lost, and the chief restores it from its checkpoint (T10.2).

    Args:
        resolver: says which task this is; None reads WORKBENCH_CLUSTER or TF_CONFIG.
        wait_s: for the chief, at the start and whenever it is gone.

    Raises:
        UsageError: this is no worker and no server, the cluster has no chief to listen to, or the chief has another description.
        ClusterError: the chief did not come, cannot be reached from here, or this machine does not have the task's address.
    """
    resolver = resolver or ClusterResolver.from_environment()
    if resolver.role not in ("worker", "ps"):
        raise UsageError(
            f"{resolver.source}: this process is the {resolver.role}, and only a worker or ps serves. The chief calls "
            "connect_to_cluster(); an evaluator needs no cluster."
        )
    assert resolver.task is not None
    assert resolver.address is not None
    head = chief_address(resolver)
    host, port = split_address(resolver.address)
    log = logging.getLogger(__name__)
    log.info("%s: waiting for the chief at %s:%d, up to %g s", resolver.task, *head, wait_s)
    while True:
        node = RayNode.join(head, host, port, offered(resolver.task.type, resolver.task.index), wait_s=wait_s)  # type: ignore[arg-type]
        try:
            log.info("%s: in the cluster of the chief at %s:%d", resolver.task, *head)
            silent, agreed = 0, False
            while silent < LOST and not node.broken:
                state = node.state()
                if state == "ended":
                    return
                silent = silent + 1 if state == "lost" else 0
                agreed = agreed or _agree(resolver, node)
                time.sleep(POLL_S)
        finally:
            node.close()
        log.warning(
            "%s: the chief at %s:%d is gone; waiting %g s for it to come again. Ctrl-C ends this task.",
            resolver.task,
            *head,
            wait_s,
        )


def _agree(resolver: ClusterResolver, node: RayNode) -> bool:
    """Return whether the chief has the same description, once it has said which."""
    assert resolver.cluster_spec is not None
    own, chiefs = json.dumps(resolver.cluster_spec.to_dict()), node.read(DESCRIPTION)
    if chiefs is not None and chiefs != own:
        raise UsageError(
            f"{resolver.source}: {resolver.task} and the chief have different descriptions of the cluster: {own} here, {chiefs} there. "
            "Give every task the same."
        )
    return chiefs is not None


def chief_address(resolver: ClusterResolver) -> tuple[str, int]:
    """Return host and port at which the chief listens.

    Raises:
        UsageError: it is not said.
    """
    chief = resolver.cluster_spec.chief if resolver.cluster_spec is not None else ()
    if not chief:
        raise UsageError(
            f'{resolver.source}: the cluster names no chief, and workers and servers meet where it listens. Add "chief": ["host:port"].'
        )
    return split_address(chief[0])


def offered(job: Job, index: int) -> str:
    """Return what the machine of a task offers to Ray, so that it runs this task and no other."""
    return f"workbench-{job}-{index}"
