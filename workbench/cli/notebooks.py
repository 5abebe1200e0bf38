"""`workbench list`, `describe`, `run` and `lab`: what can be run, and notebooks."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.commands import FAILED, RAN, exit_code
from workbench.errors import UsageError, WorkbenchError

if TYPE_CHECKING:
    from workbench.notebook.runner import NotebookInfo


def list_all(_: argparse.Namespace) -> int:
    """Print the bundled workloads and the notebooks of this folder."""
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


def describe(args: argparse.Namespace) -> int:
    """Print a notebook's question and its parameters."""
    from workbench.notebook.runner import describe_notebook

    print(describe_notebook(args.notebook))
    return RAN


def run(args: argparse.Namespace) -> int:
    """Run a notebook, once or once for each set of parameters, and print the verdicts."""
    from workbench.notebook.parameters import parse_parameters, parse_sweeps
    from workbench.notebook.runner import describe_notebook

    info = describe_notebook(args.notebook)
    values = parse_parameters(info.parameters, args.parameter)
    rows = parse_sweeps(info.parameters, args.sweep)
    twice = sorted({name for row in rows for name in row if name in values})
    if twice:
        raise UsageError(f"parameter {twice[0]!r} is given by -p and for each run: leave one out.")
    if not rows:
        return _run_one(args, info, values)
    from workbench.notebook.batch import run_notebooks

    batch = [{**values, **row} for row in rows]
    runs = run_notebooks(info.path, batch, out=args.out, progress=True)
    print(runs)
    return FAILED if runs.crashed else _code([run.verdicts for run in runs.runs], args.fail_on)


def _run_one(args: argparse.Namespace, info: NotebookInfo, values: dict[str, Any]) -> int:
    from workbench.findings.finding import MEASUREMENTS
    from workbench.notebook.runner import read_verdict, run_notebook

    out = None if args.out is None else Path(args.out)
    output = out / info.path.name if out is not None and out.suffix != ".ipynb" else out
    done = run_notebook(info.path, values, output=output, progress=True)
    verdicts = read_verdict(done, required=False)
    for verdict in verdicts:
        print(f"{verdict['workload'] or info.title}: {verdict['verdict']}")
        told = [f for f in verdict["findings"] if f["status"] != "ok" or f["code"] in MEASUREMENTS]
        for finding in told:
            print(f"  {finding['status']:<12} {finding['code']:<26} {finding['summary']}")
        print(f"  {len(verdict['findings']) - len(told)} more are ok, as the page says.")
    print(f"Notebook: {done}\nPage:     {done.with_suffix('.html')}")
    return _code([verdicts], args.fail_on)


def _code(runs: Iterable[Sequence[Mapping[str, Any]]], fail_on: str | None) -> int:
    """Return the exit code of one or more runs, each with the verdicts that its notebook shows."""
    return max(exit_code([f["status"] for verdict in run for f in verdict["findings"]], fail_on) for run in runs)


def lab(args: argparse.Namespace) -> int:
    """Become a JupyterLab server on this machine alone, for copies of the notebooks of this folder: what is run in them changes no tracked file."""
    from importlib.util import find_spec

    if find_spec("jupyterlab") is None:
        raise WorkbenchError("JupyterLab is not installed: pip install 'training-workbench[lab]', or run make lab.")
    if not Path("notebooks").is_dir():
        raise UsageError("there is no folder notebooks/ here: start workbench lab in the folder that holds it.")
    words = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1"]
    copies = working_copies(Path("notebooks"))
    words += ["--ServerApp.root_dir=."]  # notebooks link to pages in docs/
    first = copies / "00_quickstart.ipynb"
    words += [f"--LabApp.default_url=/lab/tree/{first.as_posix()}"] if first.exists() else []
    words += ["--no-browser"] if args.no_browser else []
    if getattr(os, "geteuid", lambda: 1)() == 0:  # a container; the server is on loopback and asks for its token
        words.append("--allow-root")
    words += [f"--port={args.port}"] if args.port is not None else []
    settings = str(Path(__file__).with_name("lab"))  # pages open as pages; no question about news
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, [settings, os.environ.get("JUPYTER_CONFIG_PATH")]))
    os.execv(sys.executable, words)  # JupyterLab takes this process over, and with it Ctrl-C


def working_copies(source: Path) -> Path:
    """Return the folder `my_notebooks` beside `source`, with copies of its files: one that is as it was copied follows its original, one that was changed stays."""
    from workbench.record.folder import write_json

    target = source.resolve().parent / "my_notebooks"
    target.mkdir(exist_ok=True)
    (target / ".gitignore").write_text("*\n")
    as_copied, kept = target / ".copied.json", []
    known = json.loads(as_copied.read_text()) if as_copied.exists() else {}
    for path in sorted(path for path in source.iterdir() if path.is_file()):
        copy, new = target / path.name, _hash(path)
        if not copy.exists() or _hash(copy) in (new, known.get(path.name)):
            shutil.copy2(path, copy)
            known[path.name] = new
        elif known.get(path.name, new) != new:
            kept.append(path.name)
    write_json(as_copied, known)
    if kept:
        print(
            f"Newer in {source}, and kept as you changed them: {', '.join(kept)}. Rename or delete a copy to get the new one."
        )
    return Path(os.path.relpath(target))


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
