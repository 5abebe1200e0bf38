"""A JupyterLab of one's own on loopback, and a page in headless Chromium that is driven through its commands."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import BrowserContext, Locator, Page

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZE = {"width": 1280, "height": 800}
WAIT_S = 90.0  # a machine with other work on it takes long; what waits says what it waits for
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},  # all cells are in the page
}
HARMLESS = re.compile(r"Could not restore the debugger state: Canceled future")  # JupyterLab's own, after a reload
CELLS = """() => {
  const panel = window.jupyterapp.shell.currentWidget;
  return panel.content.model.sharedModel.toJSON().cells;
}"""


class Lab:
    """A server whose settings, workspaces and runtime files are its own.

    Attributes:
        root: the folder that it shows and that kernels start in.
        address: with the port.
        token: what it asks for.
    """

    def __init__(self, root: Path, private: Path, *, live: bool = True) -> None:
        self.root = root
        self._log = private / "lab.log"
        port, token = free_port(), secrets.token_hex(16)
        self.address, self.token = f"http://127.0.0.1:{port}", token
        places = {name: str(private / name) for name in ("config", "data", "runtime", "settings", "workspaces")}
        for name, values in SETTINGS.items():
            file = Path(places["settings"]) / f"{name.replace(':', '/')}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        env = {k: v for k, v in os.environ.items() if k not in ("MPLBACKEND", "WORKBENCH_LIVE")}
        env |= {
            "JUPYTER_CONFIG_DIR": places["config"],
            "JUPYTER_RUNTIME_DIR": places["runtime"],
            "IPYTHONDIR": str(private / "ipython"),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")]).rstrip(
                os.pathsep
            ),
        }
        if not live:
            env["WORKBENCH_LIVE"] = "0"
        words = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
        words += ["--port-retries=0", f"--IdentityProvider.token={token}", "--expose-app-in-browser", "--allow-root"]
        words += [f"--ServerApp.root_dir={root}", f"--LabApp.user_settings_dir={places['settings']}"]
        words += [f"--LabApp.workspaces_dir={places['workspaces']}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(words, env=env, cwd=root, stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"JupyterLab did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.1)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def write(self, name: str, cells: Sequence[str]) -> str:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.root / name)
        return name


@dataclass
class Desk:
    """One page of JupyterLab with one notebook in front, and everything its console complained of.

    Attributes:
        page: of playwright.
        lab: the server.
        shots: folder of screenshots.
        complaints: errors of the console and of the page, harmless ones left out.
        name: of the notebook that was opened last.
    """

    page: Page
    lab: Lab
    shots: Path
    complaints: list[str] = field(default_factory=list)
    name: str = ""

    @classmethod
    def at(cls, context: BrowserContext, lab: Lab, shots: Path) -> Desk:
        desk = cls(page=context.new_page(), lab=lab, shots=shots)
        desk.page.set_default_timeout(WAIT_S * 1000)
        desk.page.on("console", lambda m: desk._complain(f"{m.text} ({m.location.get('url', '')})", m.type == "error"))
        desk.page.on("pageerror", lambda error: desk._complain(f"{error.name}: {error.message}", True))
        desk.page.goto(f"{lab.address}/lab/workspaces/{secrets.token_hex(4)}?token={lab.token}")
        desk.wait_for_app()
        return desk

    def _complain(self, said: str, bad: bool) -> None:
        if bad and not HARMLESS.search(said):
            self.complaints.append(said)

    def wait_for_app(self) -> None:
        self.page.wait_for_function(
            "() => window.jupyterapp && window.jupyterapp.commands.hasCommand('docmanager:open')"
        )
        self.page.evaluate("async () => { await window.jupyterapp.restored; }")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")

    def command(self, name: str, **arguments: Any) -> None:
        self.page.evaluate(
            "([name, given]) => { void window.jupyterapp.commands.execute(name, given); }", [name, arguments]
        )

    def open(self, name: str, *, wait: bool = True) -> None:
        """Open a notebook in front, or bring it there; with `wait` until its kernel waits for code."""
        self.name = name
        self.page.evaluate(
            """async (path) => {
              await window.jupyterapp.commands.execute("docmanager:open", {path, factory: "Notebook"});
            }""",
            name,
        )
        if self.page.evaluate("() => !window.jupyterapp.shell.leftCollapsed"):
            self.command("application:toggle-left-area")
        if wait:
            self.wait_for_kernel()

    def wait_for_kernel(self) -> None:
        """Wait until the notebook in front has a kernel that waits for code."""
        self.page.wait_for_function(
            """() => {
              const panel = window.jupyterapp.shell.currentWidget;
              const kernel = panel && panel.sessionContext && panel.sessionContext.session
                && panel.sessionContext.session.kernel;
              return kernel && kernel.status === "idle" && kernel.connectionStatus === "connected";
            }"""
        )

    def wait_until_busy(self) -> None:
        self.page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'busy'"
        )

    def run_all(self, *, wait: bool = True) -> None:
        self.command("notebook:run-all-cells")
        if wait:
            self.wait_until_run()

    def wait_until_run(self) -> None:
        """Wait until each code cell has run, or one has raised, and the kernel is idle."""
        self.page.wait_for_function(
            """() => {
              const panel = window.jupyterapp.shell.currentWidget;
              const code = panel.content.model.sharedModel.toJSON().cells.filter((c) => c.cell_type === "code");
              const raised = code.some((c) => c.outputs.some((o) => o.output_type === "error"));
              const done = raised || code.every((c) => c.execution_count || !c.source.length);
              return done && panel.sessionContext.session.kernel.status === "idle";
            }"""
        )

    def run_cell(self, number: int) -> None:
        """Run the code of one cell, counted from 0 over all cells, and do not wait."""
        self.page.evaluate(
            """(number) => {
              const panel = window.jupyterapp.shell.currentWidget;
              panel.content.activeCellIndex = number;
              void window.jupyterapp.commands.execute("notebook:run-cell");
            }""",
            number,
        )

    def interrupt(self) -> None:
        self.command("notebook:interrupt-kernel")

    def restart(self) -> None:
        """Restart the kernel without a question, and wait for the new one."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
        self.wait_for_kernel()

    def save(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def reload(self) -> None:
        """Load the page anew, as F5 does, with the same notebook in front; its kernel may be busy."""
        self.page.reload()
        self.wait_for_app()
        self.open(self.name, wait=False)
        self.page.wait_for_function(
            "() => { const s = window.jupyterapp.shell.currentWidget.sessionContext; return s && s.session; }"
        )

    def cells(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.page.evaluate(CELLS)
        return found

    def errors(self) -> list[str]:
        outputs = [output for cell in self.cells() for output in cell.get("outputs", [])]
        return [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]

    def cell(self, number: int) -> Locator:
        """Return a cell of the notebook, counted from 0 over all cells, scrolled into view."""
        found = self.page.locator(".jp-Notebook .jp-Cell").nth(number)
        found.scroll_into_view_if_needed()
        return found

    def screenshot(self, name: str) -> Path:
        path = self.shots / f"{name}.png"
        self.page.screenshot(path=path)
        return path


def start_lab(root: Path, private: Path, *, live: bool = True) -> Iterator[Lab]:
    lab = Lab(root, private, live=live)
    try:
        yield lab
    finally:
        lab.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
