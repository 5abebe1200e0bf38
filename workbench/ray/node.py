"""`RayNode`: this machine, or a part of it, as one of the machines of a Ray cluster, for as long as this process lives."""

import contextlib
import errno
import logging
import os
import socket
import time
from typing import Any, Self

from workbench.errors import ClusterError
from workbench.ray.address import CONNECT_S, is_loopback, require_token
from workbench.ray.cluster import BUSY, OBJECT_STORE_BYTES, RayCluster, on_loopback, patient, quiet, require_ray
from workbench.ray.folders import cluster_folder

UNREACHABLE_S = 10.0  # and how long nothing at all may come back from it
POLL_S = 0.2
LEAVE_S = 10.0  # that the others may take to see that all is done
# Whether a machine is alive is asked once a second; five times without an answer and it is given up. A machine whose process was killed
# refuses at once.
HEALTH = {
    "health_check_initial_delay_ms": 5_000,
    "health_check_period_ms": 1_000,
    "health_check_timeout_ms": 5_000,
    "health_check_failure_threshold": 5,
}
_NAMESPACE, _ENDED = b"workbench", b"ended"


class RayNode:
    """A machine of a Ray cluster: its processes are children of this one, and gone with it, however it ends."""

    def __init__(self, node: Any, leave: contextlib.ExitStack) -> None:
        self._node, self._leave = node, leave

    @classmethod
    def start(cls, host: str, port: int, resource: str, *, wait_s: float = 0.0) -> Self:
        """Begin a cluster that others join at host:port; a name that is not known yet is waited for."""
        until = time.monotonic() + wait_s
        given = {"gcs_server_port": port, "_system_config": {"worker_niceness": 0, **HEALTH}}
        return cls._up(own_address(host, port, wait_s), resource, until, head=True, **given)

    @classmethod
    def join(
        cls, head: tuple[str, int], host: str, port: int, resource: str, *, wait_s: float, seen: bool = False
    ) -> Self:
        """Join the cluster at `head` as soon as it is there; where it was `seen` before, a network that is cut is waited for as long."""
        until = time.monotonic() + wait_s
        ip = own_address(host, port, wait_s)
        reach(head, until - time.monotonic(), seen=seen)
        return cls._up(ip, resource, until, head=False, gcs_address=_joined(head), node_manager_port=port)

    @classmethod
    def _up(cls, ip: str, resource: str, until: float, *, head: bool, **given: Any) -> Self:
        require_ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        require_token(alone=is_loopback(ip))
        while True:
            try:
                return cls._tried(ip, resource, head=head, **given)
            except ClusterError as error:  # the head's port is open before it answers
                if time.monotonic() > until or (head and BUSY not in str(error)):
                    raise
                time.sleep(1.0)

    @classmethod
    def _tried(cls, ip: str, resource: str, *, head: bool, **given: Any) -> Self:
        # `ray start` takes no loopback address for a second node, and its processes outlive this one
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        leave = contextlib.ExitStack()
        try:
            params = RayParams(
                node_ip_address=ip,
                num_cpus=len(os.sched_getaffinity(0)),
                resources={resource: 1},
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                no_monitor=True,
                min_worker_port=0,
                max_worker_port=0,
                temp_dir=leave.enter_context(cluster_folder()),
                **given,
                include_log_monitor=False,  # type: ignore[arg-type]
            )
            node = Node.__new__(Node)
            leave.callback(_ended, node)  # also of one that comes half up
            with _local(ip), patient(), quiet(logging.CRITICAL):
                node.__init__(params, head=head, shutdown_at_exit=False, spawn_reaper=True)  # type: ignore[misc]
        except Exception as error:
            leave.close()
            what = (
                "no Ray cluster can be started" if head else "the Ray cluster answers, but this machine cannot join it"
            )
            said = str(error).strip().splitlines()
            busy = f" {BUSY}" if "timed out" in str(error) and BUSY not in str(error) else ""
            raise ClusterError(f"{what}: {(said or [type(error).__name__])[0][:300]}{busy}") from error
        return cls(node, leave)

    @property
    def address(self) -> str:
        """ "host:port" where others join."""
        return str(self._node.gcs_address)

    @property
    def broken(self) -> bool:
        """Whether a process of it has ended by itself."""
        return not self._node.remaining_processes_alive()

    def connect(self) -> RayCluster:
        """Join the cluster from this process, which runs the node too; `close` leaves it, and the node stays."""
        ip = self._node.node_ip_address
        with _local(ip):
            return RayCluster.connect(self.address, host=ip)

    def write(self, name: str, text: str) -> None:
        """Leave a text where every machine of the cluster can `read` it."""
        self._node.get_gcs_client().internal_kv_put(name.encode(), text.encode(), True, _NAMESPACE)

    def read(self, name: str) -> str | None:
        """Return the text that a machine wrote under this name; None where there is none, or no answer."""
        try:
            said = self._node.get_gcs_client().internal_kv_get(name.encode(), _NAMESPACE, timeout=CONNECT_S)
        except Exception:  # whatever Ray's client raises, there was no answer
            return None
        return None if said is None else said.decode()

    def say_ended(self) -> None:
        """Tell the other machines that all is done, and wait until they have left, for a while."""
        client = self._node.get_gcs_client()
        client.internal_kv_put(_ENDED, b"yes", True, _NAMESPACE)
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until:
            if sum(info.state == 0 for info in client.get_all_node_info(timeout=CONNECT_S).values()) <= 1:
                return
            time.sleep(POLL_S)

    def state(self) -> str:
        """Return "there", "ended" after `say_ended`, or "lost" where the cluster does not answer any more, or is another one by now."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
            client = self._node.get_gcs_client()
            name = client.internal_kv_get(b"session_name", b"session", timeout=CONNECT_S)  # where Ray keeps it
            said = client.internal_kv_get(_ENDED, _NAMESPACE, timeout=CONNECT_S)
        except Exception:  # whatever Ray's client raises, there was no answer
            return "lost"
        if name is None or name.decode() != self._node.session_name:
            return "lost"
        return "there" if said is None else "ended"

    def close(self) -> None:
        """Leave the cluster, or end it where it was started here; nothing stays behind. A second call does nothing."""
        self._leave.close()


def own_address(host: str, port: int, wait_s: float = 0.0) -> str:
    """Return the number of an address of this machine on which a port is free; a name may become known as late as that."""
    until = time.monotonic() + wait_s
    while True:
        try:
            family, kind, _, _, there = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
            break
        except OSError as error:
            if time.monotonic() >= until:
                raise ClusterError(
                    f"{host}:{port}: the name {host!r} is not known here ({error.strerror}). Give its address."
                ) from error
            time.sleep(POLL_S)
    with socket.socket(family, kind) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(there)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                what = f"port {port} is taken by another program. Give this task another port, on every machine"
            elif error.errno == errno.EADDRNOTAVAIL:
                what = f"{there[0]} is not an address of this machine. Start this task on the machine that has it"
            else:
                what = f"this process may not listen there ({error.strerror})"
            raise ClusterError(f"{host}:{port}: {what}.") from error
    return str(there[0])


def reach(address: tuple[str, int], wait_s: float, *, seen: bool = False) -> None:
    """Wait until somebody listens at an address; one from which nothing comes back is given up sooner, unless it was `seen` before."""
    host, port = address
    begun = time.monotonic()
    while True:
        why = ""
        try:
            socket.create_connection((host.strip("[]"), port), timeout=CONNECT_S).close()
            return
        except socket.gaierror as error:  # names of containers and pods become known as these start
            allowed, why = wait_s, f"its name is not known here ({error.strerror}). Is it right?"
        except ConnectionRefusedError:
            allowed = wait_s
            why = "the machine is there, and nothing listens on that port. Was the chief started?"
        except OSError as error:
            allowed = wait_s if seen else min(wait_s, UNREACHABLE_S)
            why = f"{error.strerror or 'no answer'}. Is the address right, and does the network let it through?"
        waited = time.monotonic() - begun
        if waited >= allowed:
            raise ClusterError(f"the chief at {host}:{port} was not reached in {waited:.0f} s: {why}")
        time.sleep(POLL_S)


def _joined(address: tuple[str, int]) -> str:
    """Return "host:port" with the host as a number: Ray compares addresses as they are written."""
    host, port = address
    number = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][4][0]
    return f"[{number}]:{port}" if ":" in str(number) else f"{number}:{port}"


def _local(ip: str) -> contextlib.AbstractContextManager[None]:
    return on_loopback() if is_loopback(ip) else contextlib.nullcontext()


def _ended(node: Any) -> None:
    with contextlib.suppress(Exception):
        node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
