"""Run a notebook as a function: checked parameters in, an executed copy and its verdicts out.

The only place that knows papermill, nbclient and nbformat.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
import papermill
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from traitlets import Type

from workbench.errors import NotebookError, UnknownNameError, UsageError, nearest
from workbench.notebook_parameters import NotebookParameter, check_parameters, read_parameters

__all__ = [
    "VERDICT_MIME",
    "NotebookInfo",
    "describe_notebook",
    "find_notebook",
    "list_notebooks",
    "read_verdict",
    "run_notebook",
]

VERDICT_MIME = "application/vnd.workbench.verdict+json"
ENGINE = "workbench"
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class NotebookInfo:
    """What a notebook answers and what can be set in it.

    Attributes:
        path: the file.
        title: its first heading.
        question: the text of its first cell, without the heading.
        parameters: what `-p name=value` may set, in order.
    """

    path: Path
    title: str
    question: str
    parameters: tuple[NotebookParameter, ...]

    def __str__(self) -> str:
        """Return what `workbench describe` shows."""
        lines = [
            self.title,
            "",
            self.question,
            "",
            "Parameters (-p name=value):" if self.parameters else "No parameters.",
        ]
        for p in self.parameters:
            lines.append(f"  {p.name}: {p.type} = {p.default}" + (f"  # {p.help}" if p.help else ""))
        return "\n".join(lines)


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
    def create_kernel_manager(self) -> Any:
        """Return a manager whose kernel is this very interpreter and whose shell channel polls."""
        manager = super().create_kernel_manager()
        manager.client_factory = _PollingKernelClient
        manager.kernel_spec.argv[0] = sys.executable
        return manager


class _Engine(NBClientEngine):  # type: ignore[misc]
    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, *, start_timeout: int = 60, execution_timeout: int | None = None, **_: Any
    ) -> Any:
        """Execute with the polling client, in an environment that says that no page is looking."""
        client = _Client(
            nb_man,
            kernel_name=kernel_name,
            timeout=execution_timeout,
            startup_timeout=start_timeout,
            extra_arguments=["--log-level=CRITICAL"],
        )
        return client.execute(env=_kernel_environment())


papermill_engines.register(ENGINE, _Engine)


def run_notebook(
    name_or_path: str | Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    output: str | Path | None = None,
    cwd: str | Path | None = None,
    timeout_s: int | None = None,
    progress: bool = False,
) -> Path:
    """Run a notebook with `parameters` and return the path of the executed copy.

    Args:
        name_or_path: a file, or a name looked up in `./notebooks`, with or without its number.
        parameters: values by name; names and types are checked before a kernel starts.
        output: where the executed copy goes, overwriting it; None is a new file in `runs/notebooks/`.
        cwd: folder that the notebook runs in; None is the current one.
        timeout_s: seconds that one cell may take; None is no limit.
        progress: show a bar of the cells on standard error.

    Raises:
        UnknownNameError: no such notebook, or no such parameter.
        UsageError: a parameter of another type, or `output` is the notebook itself.
        NotebookError: a cell raised, or the kernel died; the copy holds everything up to there.
    """
    info = describe_notebook(name_or_path)
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in (parameters or {}).items()}
    check_parameters(info.parameters, values)
    target = _free_output(info.path) if output is None else Path(output)
    if target.resolve() == info.path.resolve():
        raise UsageError(f"output={str(output)!r} is the notebook itself: give another file, or leave output out.")
    folder = Path.cwd() if cwd is None else Path(cwd)
    if not folder.is_dir():
        raise UsageError(f"cwd={str(cwd)!r} is not a folder: create it, or leave cwd out for the current one.")
    target.parent.mkdir(parents=True, exist_ok=True)
    _execute(info.path, target.resolve(), values, folder=folder, timeout_s=timeout_s, progress=progress)
    return target


def describe_notebook(name_or_path: str | Path) -> NotebookInfo:
    """Return a notebook's title, question and parameters, without running it.

    Raises:
        UnknownNameError: no such notebook.
        NotebookError: the file is not a notebook.
    """
    path = find_notebook(name_or_path)
    notebook = _read(path)
    text = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), "")
    head, _, rest = text.strip().partition("\n")
    tagged = [c for c in notebook.cells if c.cell_type == "code" and "parameters" in c.metadata.get("tags", [])]
    declared = read_parameters(tagged[0].source) if tagged else ()
    return NotebookInfo(path=path, title=head.lstrip("# ") or path.stem, question=rest.strip(), parameters=declared)


def list_notebooks(folder: str | Path = "notebooks") -> list[NotebookInfo]:
    """Return what the notebooks of `folder` answer, in the order of their numbers."""
    return [describe_notebook(path) for path in sorted(Path(folder).glob("*.ipynb"))]


def find_notebook(name_or_path: str | Path, *, folder: str | Path = "notebooks") -> Path:
    """Return the file that a path or a name means.

    Args:
        name_or_path: `notebooks/01_lr_sweep.ipynb`, `01_lr_sweep` or `lr_sweep`.
        folder: where names are looked up.

    Raises:
        UnknownNameError: there is none; the nearest name is given.
    """
    path = Path(name_or_path)
    if path.suffix == ".ipynb" and path.is_file():
        return path
    there = sorted(Path(folder).glob("*.ipynb"))
    wanted = path.name.removesuffix(".ipynb")
    if str(path) in {wanted, f"{wanted}.ipynb"}:
        for exact in (lambda p: p.stem == wanted, lambda p: _bare(p) == wanted):
            for candidate in there:
                if exact(candidate):
                    return candidate
    if not there:
        raise UnknownNameError(
            f"no notebook {str(name_or_path)!r}: there is no such file, and no notebook in {str(folder)!r}. "
            "Give the path of an .ipynb file, or call this from the folder that holds notebooks/."
        )
    raise UnknownNameError(f"no notebook {str(name_or_path)!r}.{nearest(wanted, [_bare(p) for p in there])}")


def read_verdict(path: str | Path, *, required: bool = True) -> list[dict[str, Any]]:
    """Return every diagnosis that an executed notebook shows, in order; the dictionaries of `diagnosis.json`.

    Args:
        path: an executed notebook.
        required: whether a notebook without a verdict is an error.

    Raises:
        NotebookError: the file is missing or not a notebook, or it holds no verdict where one is required.
    """
    found = []
    for cell in _read(Path(path)).cells:
        for output in cell.get("outputs", []):
            verdict = output.get("data", {}).get(VERDICT_MIME)
            if verdict is not None:
                found.append(json.loads(verdict) if isinstance(verdict, str) else json.loads(json.dumps(verdict)))
    if required and not found:
        raise NotebookError(f"{path} holds no verdict: run it first, and end a cell with a diagnosis.")
    return found


def _execute(
    path: Path, target: Path, values: Mapping[str, Any], *, folder: Path, timeout_s: int | None, progress: bool
) -> None:
    try:
        papermill.execute_notebook(
            path.resolve(),
            target,
            parameters=dict(values),
            engine_name=ENGINE,
            kernel_name="python3",
            language="python",
            cwd=folder,
            progress_bar=progress,
            execution_timeout=timeout_s,
        )
    except PapermillExecutionError as error:
        where = f"In [{error.exec_count}]" if error.exec_count else f"cell {error.cell_index}"
        said = f"{error.ename}: {error.evalue}".rstrip(": .")
        raise NotebookError(
            f"{path.name} stopped at {where}, {_line_that_raised(error)!r}: {said}. See {target}."
        ) from error
    except CellTimeoutError as error:
        raise NotebookError(f"{path.name}: a cell took longer than timeout_s={timeout_s}. See {target}.") from error
    except (DeadKernelError, RuntimeError) as error:
        raise NotebookError(
            f"{path.name}: the kernel died ({error}); often that is memory. Studies on disk resume. See {target}."
        ) from error


def _kernel_environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    return {**environment, "WORKBENCH_LIVE": "0", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def _read(path: Path) -> Any:
    try:
        return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, nbformat.ValidationError, AttributeError) as error:
        raise NotebookError(f"{path} cannot be read as a notebook: {error}") from error


def _free_output(path: Path) -> Path:
    folder = Path("runs/notebooks")
    names = (f"{path.stem}{f'-{n}' if n > 1 else ''}.ipynb" for n in range(1, sys.maxsize))
    return next(folder / name for name in names if not (folder / name).exists())


def _bare(path: Path) -> str:
    number, _, rest = path.stem.partition("_")
    return rest if number.isdigit() and rest else path.stem


def _line_that_raised(error: PapermillExecutionError) -> str:
    """Return the line of the cell that the traceback begins with; its first line of code where the traceback does not say."""
    lines: list[str] = str(error.source).splitlines()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    found = re.search(r"Cell In ?\[\d+\], line (\d+)|line (\d+) of the cell", plain)
    at = int(found[1] or found[2]) if found else 0
    if 0 < at <= len(lines):
        return lines[at - 1].strip()
    return next((line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")), "")
