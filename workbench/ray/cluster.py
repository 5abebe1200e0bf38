"""`RayCluster`: processes on a Ray cluster that is found or started; Ray is imported here, by `ray_node` and `ray_token`, and nowhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import ClusterError, WorkbenchError
from workbench.ray.address import check_address, only_on_loopback, require_token
from workbench.ray.folders import cluster_folder
from workbench.workloads.registry import file_modules

OBJECT_STORE_BYTES = 100 * 2**20  # rule of thumb: fits where /dev/shm is small; what is larger goes to the disk
START_S = 90.0  # until a cluster that is started here has to be up
BUSY = "A busy machine takes longer than Ray waits: give the same command again, with less beside it."


class WorkerLost(Exception):
    """The process that was asked is gone: killed, out of memory, or its machine is."""


class NotYet(TimeoutError):
    """A call is not answered yet; a `TimeoutError` without more is what the method itself raised."""


class RayCluster:
    """Starts processes on a cluster, calls methods in them, and waits for the answers."""

    def __init__(self, ray: Any, leave: Callable[[], None]) -> None:
        self._ray, self._leave = ray, leave

    @classmethod
    def connect(cls, address: str | None = None, *, host: str | None = None) -> RayCluster:
        """Join the cluster at `address`, the one that this process has joined already, or a new one on this machine.

        Args:
            address: "host:port" of a cluster that is running, "auto" for the one that was started on this machine; None
                takes the cluster that this process is connected to, or starts one: on the loopback interface, with
                as many CPUs as this process may use, gone after `close`.
        """
        require_ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if ray.is_initialized():
            _check_same(address, ray.get_runtime_context().gcs_address)
            return cls(ray, lambda: None)
        given: dict[str, Any] = {"address": address, "_node_ip_address": host}
        with contextlib.ExitStack() as leave, contextlib.ExitStack() as while_starting:
            if address is None:
                require_token(alone=True)
                failed = "no Ray cluster can be started on this machine"
                given = {
                    "address": "local",
                    "num_cpus": len(os.sched_getaffinity(0)),
                    "include_dashboard": False,
                    "object_store_memory": OBJECT_STORE_BYTES,
                    "_temp_dir": leave.enter_context(cluster_folder()),
                    # as in this process; 15 starves them where others compute
                    "_system_config": {"worker_niceness": 0},
                }
                while_starting.enter_context(patient())
            else:
                if host is None:  # else this process runs a part of it itself
                    check_address(address)
                failed = f"address={address!r}: the cluster answers, but this process cannot join it"
            if address is None or (host is None and only_on_loopback(address, address_of_this_worker())):
                while_starting.enter_context(on_loopback())
            leave.callback(ray.shutdown)
            leave.enter_context(_silent_deaths())
            with _as_cluster_error(failed), quiet(), _own_sigterm():
                ray.init(log_to_driver=False, configure_logging=False, **given)
            return cls(ray, leave.pop_all().close)

    @classmethod
    def joined(cls) -> RayCluster:
        """Return the cluster to which this process belongs, as a process that was placed on it does."""
        import ray

        return cls(ray, lambda: None)

    def total(self, resource: str) -> int:
        """Return how many "CPU" or "GPU" the machines that are in the cluster now have, busy or not."""
        return int(self._ray.cluster_resources().get(resource, 0))

    def machines(self, resource: str) -> list[int]:
        """Return how many "CPU" or "GPU" each machine has that is in the cluster now, busy or not."""
        return [int(node["Resources"].get(resource, 0)) for node in self._ray.nodes() if node["Alive"]]

    def submit(self, function: Callable[..., Any], *arguments: Any, cpus: int = 1, gpus: int = 0) -> Any:
        """Have `function`, of an importable module, called in a worker as soon as there is room. Returns what `result` waits for."""
        task = self._ray.remote(function).options(
            num_cpus=cpus, num_gpus=gpus, max_retries=0, scheduling_strategy="SPREAD"
        )
        return task.remote(*arguments)

    def cancel(self, call: Any) -> None:
        """End the worker that `submit` started for a call, or take it out of the queue."""
        if self._ray.is_initialized():
            self._ray.cancel(call, force=True)

    def begin(self, kind: type) -> Any:
        """Start a worker on this machine that takes no CPU; return `Calls` of it, which other workers can use too."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(node_of_this_worker(), soft=False)
        # A byte of memory: what asks for nothing at all is put on any machine.
        made = self._ray.remote(kind).options(num_cpus=0, memory=1, scheduling_strategy=here)
        return Calls(made.remote())

    def place(
        self,
        kind: type,
        *arguments: Any,
        cpus: int = 1,
        name: str | None = None,
        comes_back: bool = False,
        groups: Mapping[str, int] | None = None,
        resource: str | None = None,
    ) -> Any:
        """Ask for a process of its own that holds `kind(*arguments)`; it starts as soon as there is room for it.

        groups: name -> number of threads that do calls of that group beside the others; see `call`.
        resource: what the machine to start on has one of, and gives to this process; it waits for such a machine.
        """
        options: dict[str, Any] = {"num_cpus": cpus, "scheduling_strategy": "SPREAD", "name": name}
        if resource is not None:
            options |= {"resources": {resource: 1}, "scheduling_strategy": "DEFAULT"}
        made = self._ray.remote(concurrency_groups=dict(groups))(kind) if groups else self._ray.remote(kind)
        actor = made.options(**options, max_restarts=-1 if comes_back else 0, max_task_retries=0)
        return actor.remote(*arguments)

    def find(self, name: str) -> Any:
        """Return a worker that was placed with this name."""
        try:
            return self._ray.get_actor(name)
        except ValueError as error:
            raise WorkerLost(_in_short(error)) from error

    def call(self, worker: Any, method: str, *arguments: Any, group: str | None = None) -> Any:
        """Call a method in a worker's process. Returns what `result` and `answer` wait for."""
        if not self._ray.is_initialized():  # Ray would start another cluster
            raise WorkerLost("this process has left the cluster")
        bound = getattr(worker, method)
        return (bound if group is None else bound.options(concurrency_group=group)).remote(*arguments)

    def ready(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Wait until a call is answered, or for `timeout_s`; return those that are."""
        done, _ = self._ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        if done:
            done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        return list(done)

    def result(self, call: Any) -> Any:
        """Return the answer to a call."""
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            raise WorkerLost(_in_short(error)) from error

    def answer(self, call: Any, timeout_s: float | None = None) -> Any:
        """Return the answer to a call; what the method raised is raised here."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(call, timeout=timeout_s)
        except errors.GetTimeoutError:
            raise NotYet(f"no answer within {timeout_s} s") from None
        except errors.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except errors.RayError as error:
            raise WorkerLost(_in_short(error)) from error

    def pack(self, value: Any) -> bytes:
        """Return `value` as bytes that `pickle.loads` reads in a worker, functions of a script or notebook included."""
        for module in file_modules():
            self._ray.cloudpickle.register_pickle_by_value(module)
        blob: bytes = self._ray.cloudpickle.dumps(value)
        return blob

    def share(self, value: Any) -> Any:
        """Put a value where all workers can read it; it is an argument for `call` like any other."""
        return self._ray.put(value)

    def kill(self, worker: Any, *, for_good: bool = True) -> None:
        """End a worker's process, whatever it is doing."""
        if self._ray.is_initialized():
            self._ray.kill(worker, no_restart=for_good)

    def close(self) -> None:
        """Leave the cluster; one that `connect` started ends."""
        self._leave()


class Calls:
    """A worker whose methods are called like anybody's: each waits for its answer, and raises `WorkerLost` where there is none."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a function that calls the method in the worker's process."""
        if method.startswith("_"):
            raise AttributeError(method)
        cluster = RayCluster.joined()
        return lambda *arguments: cluster.result(cluster.call(self.worker, method, *arguments))


def require_ray() -> None:
    """Raise a `WorkbenchError` that says what to do where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise WorkbenchError("executor='ray' needs Ray, which is not installed: pip install 'training-workbench[ray]'.")


def node_of_this_worker() -> str:
    """Return the id that the cluster gave to the machine on which this worker runs."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def address_of_this_worker() -> str:
    """Return the address by which the other machines of the cluster reach the one on which this worker runs."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _check_same(address: str | None, joined: str) -> None:
    if address not in (None, "auto") and address.rpartition(":")[2] != joined.rpartition(":")[2]:
        raise ClusterError(
            f"address={address!r} was asked for, but this process is connected to the Ray cluster at {joined}. Leave the "
            "address out to use that one, or call ray.shutdown() before."
        )


@contextlib.contextmanager
def _as_cluster_error(what: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:  # Ray's answer to it: this process shall end
            raise
        raise ClusterError(f"{what}: {_in_short(error)}") from error


@contextlib.contextmanager
def quiet(level: int = logging.ERROR) -> Iterator[None]:
    """Let Ray greet nobody while it starts: what does not work is said by an error."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep what this program does on SIGTERM, where it does something: Ray puts its own in that place, and nothing would be saved."""
    here = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if here else None
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put something else in the place of a name of Ray's own, for which it offers no setting."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _silent_deaths() -> contextlib.AbstractContextManager[None]:
    """Let Ray not print a page for each process that dies: whoever asked it something is told by `WorkerLost`."""
    from ray._private import worker  # it prints them whatever log_to_driver and the loggers say

    return _replaced(worker, "print_to_stdstream", lambda *_, **__: None)


def patient() -> contextlib.AbstractContextManager[None]:
    """Wait longer than Ray's 30 s for a cluster to start: on a machine that has other things to do its programs take a minute."""
    from ray._private import services  # the 30 s are a number in its code

    before: Any = services.get_node
    ended = _ended_raylets()

    def get_node(*given: Any, **named: Any) -> Any:
        until = time.monotonic() + START_S
        while True:
            try:
                return before(*given, **named)
            except RuntimeError as error:
                if _ended_raylets() - ended:
                    raise ClusterError(f"Ray's raylet has ended. {BUSY}") from error
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    return _replaced(services, "get_node", get_node)


def _ended_raylets() -> set[str]:
    """Return the raylets of this thread that have ended, as one does where its helpers take more than 15 s to start."""
    with contextlib.suppress(OSError):
        children = Path("/proc/thread-self/children").read_text().split()
        return {child for child in children if "(raylet) Z" in Path(f"/proc/{child}/stat").read_text()}
    return set()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Make the cluster that is started meanwhile listen on 127.0.0.1 alone, and the one that is joined be asked there.

    Ray replaces that address by one which other machines can reach, unless it believes that clusters are not for this
    platform: its processes learn so from the environment, and this one from a constant that was set on import.
    """
    from ray._private import ray_constants  # it reads the variable on import alone, and no argument says it

    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        with _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _in_short(error: BaseException) -> str:
    """Return the first line of an error, and the one that names the cause where Ray adds one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = [line for line in lines[1:] if "Error" in line or "exit type" in line]
    return " ".join([*lines[:1], *cause[-1:]])[:600] or type(error).__name__
