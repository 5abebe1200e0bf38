"""`workbench list`, `describe`, `run` and `lab`: what can be run, and notebooks."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from workbench.cli_verdict import RAN
from workbench.errors import UsageError, WorkbenchError

__all__ = ["add_describe", "add_lab", "add_list", "add_run"]


def add_list(parser: argparse.ArgumentParser) -> None:
    """Let `workbench list` do its work."""
    parser.set_defaults(command=_list)


def _list(_: argparse.Namespace) -> int:
    from workbench.notebook_runner import list_notebooks
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
    from workbench.notebook_runner import describe_notebook

    print(describe_notebook(args.notebook))
    return RAN


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench run`."""
    parser.add_argument("notebook", metavar="NOTEBOOK", help="path, or a name in ./notebooks")
    parser.add_argument("-p", "--parameter", metavar="NAME=VALUE", action="append", default=[], help="may be repeated")
    parser.add_argument("--out", metavar="FILE", help="the executed copy (default: a new file in runs/notebooks/)")
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    from workbench.notebook_parameters import parse_parameters
    from workbench.notebook_runner import describe_notebook, read_verdict, run_notebook

    info = describe_notebook(args.notebook)
    values = parse_parameters(info.parameters, args.parameter)
    try:
        done = run_notebook(info.path, values, output=args.out, progress=True)
    except KeyboardInterrupt:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would lament the cell that we stopped waiting for
        raise
    for verdict in read_verdict(done, required=False):
        print(f"{verdict['workload'] or info.title}: {verdict['verdict']}")
        for finding in verdict["findings"]:
            print(f"  {finding['status']:<12} {finding['code']:<26} {finding['summary']}")
    print(f"Notebook: {done}")
    return RAN


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
    words = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", "--ServerApp.root_dir=notebooks"]
    words += ["--no-browser"] if args.no_browser else []
    if getattr(os, "geteuid", lambda: 1)() == 0:  # a container; the server is on loopback and asks for its token
        words.append("--allow-root")
    words += [f"--port={args.port}"] if args.port is not None else []
    os.execv(sys.executable, words)  # JupyterLab takes this process over, and with it Ctrl-C
