"""How a notebook is executed: papermill's engine with this interpreter as the kernel, waits that end, and a Ctrl-C that saves.

Ctrl-C goes to the kernel as JupyterLab's Interrupt does: the cell that runs stops as it would there, writes what it has, and
the copy keeps its outputs. A second Ctrl-C waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from queue import Empty
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from nbclient.util import run_sync
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from traitlets import Type

from workbench.progress import TOLD

ENGINE = "workbench"
_POLL_S = 0.5


class _PollingShellChannel(AsyncZMQSocketChannel):
    """Never waits on the socket for longer than `_POLL_S`.

    nbclient sends on the same socket (widget messages of the cell that runs) while it waits for the cell's reply; an
    unbounded wait then misses the wake-up now and then, and the run hangs for ever (nbclient issue 312).
    """

    async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Return the next message, or raise `queue.Empty` after `timeout` seconds; None waits on."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _POLL_S if end is None else min(_POLL_S, max(0.0, end - time.monotonic()))
            try:
                return await super().get_msg(timeout=left)
            except Empty:
                if end is not None and time.monotonic() >= end:
                    raise
                await asyncio.sleep(0)


class _PollingKernelClient(AsyncKernelClient):
    shell_channel_class = Type(_PollingShellChannel)


class _Client(PapermillNotebookClient):  # type: ignore[misc]
    interrupted = False
    shown: Any = None  # the bar of cells that says what is trained; None has none
    lines = False  # whether each section and each part of a study that begins is told as a line
    _section = _part = ""

    def create_kernel_manager(self) -> Any:
        """Return a manager whose kernel is this very interpreter and whose shell channel polls."""
        manager = super().create_kernel_manager()
        manager.client_factory = _PollingKernelClient
        manager.kernel_spec.argv[0] = sys.executable
        return manager

    async def async_execute_cell(self, cell: Any, cell_index: int, *args: Any, **kwargs: Any) -> Any:
        """Execute one cell, none once somebody has interrupted the notebook."""
        if self.interrupted:
            raise KeyboardInterrupt
        texts = [each.source for each in self.nb.cells[:cell_index] if each.cell_type == "markdown"]
        heads = [line.strip("# ") for text in texts for line in text.splitlines() if line.startswith("#")]
        if self.lines and cell.cell_type == "code" and heads and heads[-1] != self._section:
            self._section = heads[-1]
            print(self._section, file=sys.stderr, flush=True)
        if self.shown is not None:
            self.shown.set_postfix_str("")
        return await super().async_execute_cell(cell, cell_index, *args, **kwargs)

    execute_cell = run_sync(async_execute_cell)

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        """Show what a message of progress says, and keep it out of the copy."""
        told = msg["content"].get("data", {}).get(TOLD)
        if told is None:
            return super().process_message(msg, cell, cell_index)
        if self.shown is not None:
            self.shown.set_postfix_str(told["what"] + told["left"])
        elif self.lines and told["what"] != self._part:
            self._part = told["what"]
            kinds = [each.cell_type for each in self.nb.cells]
            at, of = kinds[: cell_index + 1].count("code"), kinds.count("code")
            print(f"cell {at} of {of}: {told['what']}{told['left']}", file=sys.stderr, flush=True)
        return None

    def interrupt(self) -> bool:
        """Interrupt the cell that runs, and all that it started; False where no kernel is there."""
        kernel = getattr(self.km, "provisioner", None)
        pid, group = getattr(kernel, "pid", None), getattr(kernel, "pgid", None)
        if pid is None:
            return False
        try:
            if group and group != os.getpgrp():
                os.killpg(group, signal.SIGINT)
            else:
                os.kill(pid, signal.SIGINT)
        except ProcessLookupError:
            return False
        return True


class _Engine(NBClientEngine):  # type: ignore[misc]
    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        *,
        beside: str,
        lines: bool = False,
        start_timeout: int = 60,
        execution_timeout: int | None = None,
        **_: Any,
    ) -> Any:
        """Execute with the polling client, in an environment that says that no page is looking; modules in `beside` can be imported."""
        client = _Client(
            nb_man,
            kernel_name=kernel_name,
            timeout=execution_timeout,
            startup_timeout=start_timeout,
            extra_arguments=["--log-level=CRITICAL"],
        )
        client.shown, client.lines = nb_man.pbar, lines
        with _interrupts_the_kernel(client):
            try:
                environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
                own = {"WORKBENCH_LIVE": "0", "WORKBENCH_FIGURES": "html", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
                own |= {"WORKBENCH_PROGRESS": "1"} if lines or client.shown is not None else {}
                own["PYTHONPATH"] = os.pathsep.join(filter(None, [beside, os.environ.get("PYTHONPATH")]))
                return client.execute(env=environment | own)
            finally:
                if client.interrupted:  # also where the notebook has swallowed it, or the kernel was only starting
                    raise KeyboardInterrupt


papermill_engines.register(ENGINE, _Engine)


@contextlib.contextmanager
def _interrupts_the_kernel(client: _Client) -> Iterator[None]:
    """Pass the first Ctrl-C on to the kernel; the next one is a `KeyboardInterrupt` here, at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def pass_on(number: int, frame: Any) -> None:
        if client.interrupted or not client.interrupt():
            client.interrupted = True
            before(number, frame)
        client.interrupted = True

    signal.signal(signal.SIGINT, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
