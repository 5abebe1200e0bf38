"""Run a notebook as a function: checked parameters in, an executed copy and its verdicts out."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from workbench.errors import NotebookError, UnknownNameError, UsageError, nearest
from workbench.notebook.engine import ENGINE
from workbench.notebook.html import read_notebook, write_notebook_html
from workbench.notebook.parameters import NotebookParameter, check_parameters, check_values, read_parameters
from workbench.record.folder import write_atomic
from workbench.record.redact import redact

VERDICT_MIME = "application/vnd.workbench.verdict+json"
FOLDER = Path("runs/notebooks")
"""Where executed copies go, a folder for each run or batch of runs."""
_OF_CELLS = "{l_bar}{bar:20}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


@dataclass(frozen=True, kw_only=True)
class NotebookInfo:
    """A notebook's first heading, the rest of that cell, and what `-p name=value` may set, in order."""

    path: Path
    title: str
    question: str
    parameters: tuple[NotebookParameter, ...]

    def __str__(self) -> str:
        """Return what `workbench describe` shows."""
        rows = [f"  {p.name}: {p.type} = {p.default}" + f"  # {p.help}" * bool(p.help) for p in self.parameters]
        head = "Parameters (-p name=value):" if rows else "No parameters."
        return "\n".join([self.title, "", self.question, "", head, *rows])


def run_notebook(
    name_or_path: str | Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    output: str | Path | None = None,
    cwd: str | Path | None = None,
    timeout_s: int | None = None,
    progress: bool = False,
) -> Path:
    """Run a notebook with `parameters` and return the path of the executed copy; a page of it, .html, lies beside it.

    Interrupted, the cell that runs stops as with JupyterLab's Interrupt, and copy and page hold what there is.

    Args:
        name_or_path: a file, or a name looked up in `./notebooks`, with or without its number.
        parameters: values by name; names and types are checked before a kernel starts.
        output: where the executed copy goes, overwriting it; None is a new folder `runs/notebooks/<name>/`.
        cwd: folder that the notebook runs in; None is the current one.
        timeout_s: seconds that one cell may take; None is no limit.
        progress: say which part of a study trains, its share and the time left: in a bar of the cells on a terminal, elsewhere in a line
            for each section and part that begins.

    Raises:
        UnknownNameError: no such notebook, or no such parameter.
        UsageError: a parameter of another type, or `output` is the notebook itself.
        NotebookError: a cell raised, or the kernel died; the copy holds everything up to there.
        KeyboardInterrupt: somebody stopped it; so does the copy then.
    """
    info = describe_notebook(name_or_path)
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in (parameters or {}).items()}
    check_parameters(info.parameters, values)
    folder = Path.cwd() if cwd is None else Path(cwd)
    check_values(info.parameters, values, cwd=folder)
    if output is not None and Path(output).resolve() == info.path.resolve():
        raise UsageError(f"output={str(output)!r} is the notebook itself: give another file, or leave output out.")
    if not folder.is_dir():
        raise UsageError(f"cwd={str(cwd)!r} is not a folder: create it, or leave cwd out for the current one.")
    target = new_folder(info.path.stem) / info.path.name if output is None else Path(output)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _execute(info.path, target.resolve(), values, folder=folder, timeout_s=timeout_s, progress=progress)
    except KeyboardInterrupt:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would lament a cell that nobody waits for
        raise KeyboardInterrupt(
            f"{info.path.name} was stopped; {target} holds what it had. Studies on disk resume."
        ) from None
    finally:
        if target.exists():
            write_notebook_html(target)
    return target


def new_folder(name: str) -> Path:
    """Make and return a folder of its own for a run: `runs/notebooks/<name>/`, `<name>-2/` where that is taken."""
    for number in itertools.count(1):
        folder = FOLDER / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def is_complete(copy: Path, notebook: Path, values: Mapping[str, Any]) -> bool:
    """Tell whether `copy`, which need not be there, is this very notebook, run to its end with these values."""
    if not copy.is_file():
        return False
    try:
        done, source = read_notebook(copy), read_notebook(notebook)
    except NotebookError:
        return False
    ran = done.metadata.get("papermill", {})
    cells = [cell for cell in done.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    same = [(c.cell_type, c.source) for c in cells] == [(c.cell_type, c.source) for c in source.cells]
    ended = all(c.execution_count for c in cells if c.cell_type == "code" and c.source.strip())
    given = json.loads(json.dumps(_without_secrets(values)))
    return same and ended and not ran.get("exception") and ran.get("parameters") == given


def describe_notebook(name_or_path: str | Path) -> NotebookInfo:
    """Return a notebook's title, question and parameters, without running it.

    Raises:
        UnknownNameError: no such notebook.
        NotebookError: the file is not a notebook.
    """
    path = find_notebook(name_or_path)
    notebook = read_notebook(path)
    text = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), "")
    head, _, rest = text.strip().partition("\n")
    tagged = [c for c in notebook.cells if c.cell_type == "code" and "parameters" in c.metadata.get("tags", [])]
    declared = read_parameters(tagged[0].source) if tagged else ()
    return NotebookInfo(path=path, title=head.lstrip("# ") or path.stem, question=_plain(rest), parameters=declared)


def _plain(words: str) -> str:
    """What a terminal shows of a cell: links as their words, no code to copy, no line of links to other notebooks."""
    words = re.sub(r"```.*?```\n*", "", words, flags=re.DOTALL)
    kept = [line for line in words.splitlines() if line.count("](") < 3 or " · " not in line]
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", "\n".join(kept)).strip()


def list_notebooks(folder: str | Path = "notebooks") -> list[NotebookInfo]:
    """Return what the notebooks of `folder` answer, in the order of their numbers."""
    return [describe_notebook(path) for path in sorted(Path(folder).glob("*.ipynb"))]


def find_notebook(name_or_path: str | Path, *, folder: str | Path = "notebooks") -> Path:
    """Return the file that a path or a name means.

    Args:
        name_or_path: `notebooks/01_lr_sweep.ipynb`, `01_lr_sweep` or `lr_sweep`.
        folder: where names are looked up; the current folder where it holds none.

    Raises:
        UnknownNameError: there is none; the nearest name is given.
    """
    path = Path(name_or_path)
    if path.suffix == ".ipynb" and path.is_file():
        return path
    there = sorted(Path(folder).glob("*.ipynb")) or sorted(Path().glob("*.ipynb"))
    wanted = path.name.removesuffix(".ipynb")
    if str(path) in {wanted, f"{wanted}.ipynb"}:
        named = [p for p in there if p.stem == wanted] or [p for p in there if _bare(p) == wanted]
        if named:
            return named[0]
    if not there:
        raise UnknownNameError(
            f"no notebook {str(name_or_path)!r}: there is no such file, and no notebook in {str(folder)!r}. "
            "Give the path of an .ipynb file, or call this from the folder that holds notebooks/."
        )
    raise UnknownNameError(f"no notebook {str(name_or_path)!r}.{nearest(wanted, [_bare(p) for p in there])}")


def read_verdict(path: str | Path, *, required: bool = True) -> list[dict[str, Any]]:
    """Return every diagnosis that an executed notebook shows, in order; the dictionaries of `diagnosis.json`.

    Args:
        required: whether a notebook without a verdict is an error.

    Raises:
        NotebookError: the file is missing or not a notebook, or it holds no verdict where one is required.
    """
    found = []
    for cell in read_notebook(Path(path)).cells:
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
            beside=str(path.resolve().parent),
            kernel_name="python3",
            language="python",
            cwd=folder,
            progress_bar=progress
            and sys.stderr.isatty()
            and {"desc": path.stem, "leave": False, "bar_format": _OF_CELLS},
            lines=progress and not sys.stderr.isatty(),
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
    finally:
        _cut_secrets(target, values)


def _without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "***" if redact(f"{name}={value}") != f"{name}={value}" else value for name, value in values.items()}


def _cut_secrets(target: Path, values: Mapping[str, Any]) -> None:
    """Take passwords and tokens out of the parameters that papermill has written into the executed notebook."""
    shown = _without_secrets(values)
    secret = tuple(f"{name} = " for name, value in values.items() if value != shown[name])
    if not secret or not target.is_file():
        return
    notebook = read_notebook(target)
    notebook.metadata["papermill"] |= {"parameters": shown}
    for cell in notebook.cells:
        if "injected-parameters" in cell.metadata.get("tags", []):
            lines = cell.source.split("\n")
            cell.source = "\n".join(
                f'{line.partition(" = ")[0]} = "***"' if line.startswith(secret) else line for line in lines
            )
    write_atomic(target, nbformat.writes(notebook).encode())  # type: ignore[no-untyped-call]


def _bare(path: Path) -> str:
    """The name of a notebook without its number."""
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
