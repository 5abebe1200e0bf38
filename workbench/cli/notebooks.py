"""`workbench list`, `describe`, `run` and `lab`: what can be run, and notebooks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.verdict import FAILED, RAN, add_fail_on, exit_code
from workbench.errors import UsageError, WorkbenchError

if TYPE_CHECKING:
    from workbench.notebook.runner import NotebookInfo

__all__ = ["add_describe", "add_lab", "add_list", "add_run"]


def add_list(parser: argparse.ArgumentParser) -> None:
    """Let `workbench list` do its work."""
    parser.set_defaults(command=_list)


def _list(_: argparse.Namespace) -> int:
    from workbench.notebook.runner import list_notebooks
    from workbench.workloads.registry import list_workloads

    print("Workloads (workbench diagnose NAME):")
    for name, description in list_workloads().items():
        print(f"  {name:<24} {description}")
    notebooks = list_notebooks()
    print("\nNotebooks (workbench run NAME):" if notebooks else "\nNotebooks: none in ./notebooks")
    for info in notebooks:
        print(f"  {info.path.stem:<24} {info.title}")
    return RAN


def add_describe(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench describe`."""
    parser.add_argument("notebook", metavar="NOTEBOOK", help="path, or a name in ./notebooks")
    parser.set_defaults(command=_describe)


def _describe(args: argparse.Namespace) -> int:
    from workbench.notebook.runner import describe_notebook

    print(describe_notebook(args.notebook))
    return RAN


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench run`."""
    parser.add_argument("notebook", metavar="NOTEBOOK", help="path, or a name in ./notebooks")
    parser.add_argument("-p", "--parameter", metavar="NAME=VALUE", action="append", default=[], help="may be repeated")
    many = parser.add_mutually_exclusive_group()
    many.add_argument(
        "--sweep",
        metavar="NAME=V1,V2,...",
        action="append",
        default=[],
        help="one run a value; repeated: every combination; lists in brackets, 'lrs=[0.1],[0.1,0.2]'",
    )
    many.add_argument("--parameters", metavar="FILE", help="one run a row of a .csv or .json file")
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="a file.ipynb for the executed copy, or a folder for copies and summary (default: a new one in runs/notebooks/)",
    )
    parser.add_argument("--no-input", action="store_true", help="leave the code out of the HTML pages")
    add_fail_on(parser)
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    from workbench.notebook.grid import parse_sweeps, read_rows
    from workbench.notebook.parameters import parse_parameters
    from workbench.notebook.runner import describe_notebook

    info = describe_notebook(args.notebook)
    values = parse_parameters(info.parameters, args.parameter)
    rows = read_rows(info.parameters, args.parameters) if args.parameters else parse_sweeps(info.parameters, args.sweep)
    twice = sorted({name for row in rows for name in row if name in values})
    if twice:
        raise UsageError(f"parameter {twice[0]!r} is given by -p and for each run: leave one out.")
    if rows:
        return _run_many(args, info, [{**values, **row} for row in rows])
    return _run_one(args, info, values)


def _run_one(args: argparse.Namespace, info: NotebookInfo, values: dict[str, Any]) -> int:
    from workbench.notebook.runner import read_verdict, run_notebook

    out = None if args.out is None else Path(args.out)
    output = out / info.path.name if out is not None and out.suffix != ".ipynb" else out
    done = run_notebook(info.path, values, output=output, show_input=not args.no_input, progress=True)
    verdicts = read_verdict(done, required=False)
    for verdict in verdicts:
        print(f"{verdict['workload'] or info.title}: {verdict['verdict']}")
        for finding in verdict["findings"]:
            print(f"  {finding['status']:<12} {finding['code']:<26} {finding['summary']}")
    print(f"Notebook: {done}\nPage:     {done.with_suffix('.html')}")
    return _code([verdict["verdict"] for verdict in verdicts], args.fail_on)


def _run_many(args: argparse.Namespace, info: NotebookInfo, rows: list[dict[str, Any]]) -> int:
    from workbench.notebook.batch import run_notebooks

    runs = run_notebooks(info.path, rows, out=args.out, show_input=not args.no_input, progress=True)
    print(runs)
    if runs.crashed:
        return FAILED
    return _code([run.verdict for run in runs.runs], args.fail_on)


def _code(verdicts: Sequence[str | None], fail_on: str | None) -> int:
    """Return the exit code of one or more runs, whose verdicts are None where they reached none."""
    if fail_on and (None in verdicts or not verdicts):
        raise WorkbenchError("--fail-on was given, and the notebook reached no verdict.")
    return max((exit_code(verdict, fail_on) for verdict in verdicts if verdict), default=RAN)


def add_lab(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench lab`."""
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    parser.add_argument("--port", metavar="P", type=int, help="(default: 8888, or the next free one)")
    parser.set_defaults(command=_lab)


def _lab(args: argparse.Namespace) -> int:
    from importlib.util import find_spec

    if find_spec("jupyterlab") is None:
        raise WorkbenchError("JupyterLab is not installed: pip install 'workbench[lab]', or run make lab.")
    if not Path("notebooks").is_dir():
        raise UsageError("there is no folder notebooks/ here: start workbench lab in the folder that holds it.")
    words = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1"]
    words += ["--ServerApp.root_dir=.", "--ServerApp.preferred_dir=notebooks"]  # notebooks link to pages in docs/
    first = Path("notebooks") / "00_quickstart.ipynb"
    words += [f"--LabApp.default_url=/lab/tree/{first.as_posix()}"] if first.exists() else []
    words += ["--no-browser"] if args.no_browser else []
    if getattr(os, "geteuid", lambda: 1)() == 0:  # a container; the server is on loopback and asks for its token
        words.append("--allow-root")
    words += [f"--port={args.port}"] if args.port is not None else []
    settings = str(Path(__file__).with_name("lab"))  # pages open as pages; no question about news
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, [settings, os.environ.get("JUPYTER_CONFIG_PATH")]))
    os.execv(sys.executable, words)  # JupyterLab takes this process over, and with it Ctrl-C
