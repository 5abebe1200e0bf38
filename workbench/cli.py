"""The `workbench` command: what each word does, and what the exit code says.

Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli_help import EXIT_CODES, HELP, MAIN_HELP
from workbench.errors import UsageError, WorkbenchError

if TYPE_CHECKING:
    import pandas as pd

    from workbench.diagnostics.base import Diagnosis
    from workbench.record import StudyRecord, TrialRecord

__all__ = ["build_parser", "main"]

RAN, FAILED, USAGE, VERDICT, INTERRUPTED = 0, 1, 2, 3, 130
_AT_OR_ABOVE = {"fail": ("fail",), "warn": ("fail", "warn")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the words behind `workbench`; None takes those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser().parse_args(words)
        args.words = words
        code: int = args.command(args)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse, after --help or a usage error
        return stop.code if isinstance(stop.code, int) else USAGE
    except BrokenPipeError:  # the reader of `workbench list | head` has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("WORKBENCH_DEBUG") == "1":
            raise
        return _report(error)
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(prog="workbench", description=MAIN_HELP, epilog=EXIT_CODES, **style)
    parser.add_argument("--version", action=_Version)
    parser.set_defaults(command=lambda _: _help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, add in _COMMANDS.items():
        text = HELP[name]
        command = commands.add_parser(name, help=text.line, description=text.description, epilog=text.epilog, **style)
        add(command)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and stop")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import workbench

        print(f"workbench {workbench.__version__}")
        parser.exit()


def _add_diagnose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload", metavar="WORKLOAD", help="bundled name, package.module:attribute or file.py:attribute"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder of the study (default: a new one in runs/)",
    )
    parser.add_argument("--steps", metavar="N", type=int, help="updates of a trial (default: the workload's own)")
    parser.add_argument("--study", metavar="NAME", help="name of the study (default: that of its folder)")
    parser.add_argument("--note", metavar="TEXT", help="why this was run; kept with the study (default: generated)")
    parser.add_argument("--device", metavar="D", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto)")
    parser.add_argument(
        "--seeds", metavar="N", type=int, default=3, help="trials that prove a better config (default: 3)"
    )
    parser.add_argument(
        "--executor", metavar="E", default="local", help="where trials run: local, ray (default: local)"
    )
    parser.add_argument("--address", metavar="A", help="host:port of a Ray cluster (default: one on this machine)")
    parser.add_argument("--trainer", metavar="T", default="local", help="how a trial is run: local (default: local)")
    parser.add_argument("--fail-on", choices=tuple(_AT_OR_ABOVE), help="exit with 3 on this verdict or a worse one")
    parser.set_defaults(command=_diagnose)


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a workload, or a DataLoader as module:name or file.py:name")
    step = parser.add_mutually_exclusive_group()
    step.add_argument(
        "--step", metavar="NAME", help="of a loader: a function of one batch, as module:name or file.py:name"
    )
    step.add_argument("--step-s", metavar="S", type=float, help="of a loader: seconds that your step takes")
    parser.add_argument("--out", metavar="DIR", help="folder for diagnosis.json, trace.json and figures/")
    parser.add_argument("--device", metavar="D", default="auto", help="of a workload's step (default: auto)")
    parser.add_argument("--seconds", metavar="S", type=float, default=20.0, help="to look for, about (default: 20)")
    parser.add_argument("--max-workers", metavar="N", type=int, default=8, help="worker processes to try (default: 8)")
    parser.add_argument("--timeout", metavar="S", type=float, default=60.0, help="that a batch may take (default: 60)")
    parser.add_argument("--fail-on", choices=tuple(_AT_OR_ABOVE), help="exit with 3 on this verdict or a worse one")
    parser.set_defaults(command=_input)


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_list)


def _add_describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebook", metavar="NOTEBOOK", help="path, or a name in ./notebooks")
    parser.set_defaults(command=_describe)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebook", metavar="NOTEBOOK", help="path, or a name in ./notebooks")
    parser.add_argument("-p", "--parameter", metavar="NAME=VALUE", action="append", default=[], help="may be repeated")
    parser.add_argument("--out", metavar="FILE", help="the executed copy (default: a new file in runs/notebooks/)")
    parser.set_defaults(command=_run)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", help="folder of a study")
    parser.set_defaults(command=_report_command)


def _add_studies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", nargs="?", default="runs", help="folder of studies (default: runs)")
    parser.add_argument("--rebuild", action="store_true", help="make the index again from the folders")
    parser.add_argument("--columns", metavar="A,B", default="", help="further columns, such as workload,failed,created")
    parser.add_argument("--export", metavar="FILE", help="write the table as .csv or .xlsx")
    parser.add_argument(
        "--ledger",
        metavar="URL",
        nargs="?",
        const="",
        help="list a shared ledger (default: the one in WORKBENCH_LEDGER)",
    )
    parser.set_defaults(command=_studies)


def _add_lab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    parser.add_argument("--port", metavar="P", type=int, help="(default: 8888, or the next free one)")
    parser.set_defaults(command=_lab)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "rest",
        metavar="WORKLOAD",
        nargs="*",
        help="as for diagnose; with --script, behind --, the script's own arguments",
    )
    parser.add_argument("--script", metavar="FILE", help="a training script of your own, as torchrun would start it")
    parser.add_argument("--hosts", metavar="N", type=int, default=4, help="processes that train together (default: 4)")
    parser.add_argument("--steps", metavar="N", type=int, help="updates (default: 50; a script runs to its end)")
    parser.add_argument("--out", metavar="DIR", help="folder of the study (default: runs/<name>-hosts-<time>)")
    parser.add_argument("--port", metavar="P", type=int, help="on which the ranks meet (default: a free one)")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        default=60.0,
        help="seconds without any progress, then it is ended (default: 60)",
    )
    parser.add_argument("--fail-on", choices=tuple(_AT_OR_ABOVE), help="exit with 3 on this verdict or a worse one")
    parser.set_defaults(command=_hosts)


_COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "diagnose": _add_diagnose,
    "input": _add_input,
    "list": _add_list,
    "describe": _add_describe,
    "run": _add_run,
    "report": _add_report,
    "studies": _add_studies,
    "hosts": _add_hosts,
    "lab": _add_lab,
}


def _diagnose(args: argparse.Namespace) -> int:
    if args.note is not None and not args.note.strip():
        raise UsageError(
            "--note is empty: say in a few words why this is run, or leave --note out for a generated one."
        )
    if args.steps is not None and args.steps < 1:
        raise UsageError(f"--steps {args.steps} must be at least 1; leave it out for the workload's own.")
    if args.trainer != "local":
        raise UsageError(f"--trainer {args.trainer!r} is not there: this version has only 'local'. Leave it out.")
    from workbench.playbook import diagnose

    diagnosis = diagnose(
        args.workload,
        out=args.out,
        steps=args.steps,
        study=args.study,
        note=args.note,
        device=args.device,
        executor=args.executor,
        address=args.address,
        proof_seeds=args.seeds,
        command=shlex.join(["workbench", *args.words]),
        progress=True,
    )
    print(diagnosis.brief)
    if diagnosis.recommendation:
        print(f"\nConfig to train with{'' if diagnosis.recommendation.get('changed') else ' (unchanged)'}:")
        print(diagnosis.recommendation["paste"])
        print(diagnosis.recommendation.get("reason", ""))
    _print_next(diagnosis)
    print(f"\nCost:      {_cost(diagnosis.cost)}")
    print(f"Reproduce: {diagnosis.command}")
    if diagnosis.path is not None:
        print(f"Report:    {diagnosis.path / 'report.html'}")
    return VERDICT if args.fail_on and diagnosis.verdict in _AT_OR_ABOVE[args.fail_on] else RAN


def _input(args: argparse.Namespace) -> int:
    from workbench.playbook_input import examine_input

    diagnosis = examine_input(
        args.target,
        step=args.step if args.step is not None else args.step_s,
        out=args.out,
        device=args.device,
        seconds=args.seconds,
        max_workers=args.max_workers,
        timeout_s=args.timeout,
        command=shlex.join(["workbench", *args.words]),
    )
    print(diagnosis)
    for finding in diagnosis:
        if finding.status == "warn" or finding.code == "input.bound":
            for line in finding.advice:
                print(textwrap.fill(f"- {line}", width=100, subsequent_indent="  "))
    if diagnosis.path is not None:
        print(f"Folder: {diagnosis.path}")
    return VERDICT if args.fail_on and diagnosis.verdict in _AT_OR_ABOVE[args.fail_on] else RAN


def _print_next(diagnosis: Diagnosis, *, most: int = 3) -> None:
    """Print the first lines of advice that the recommended config does not follow already; the report has them all."""
    left = (diagnosis.recommendation or {}).get("next") or ()
    if left:
        more = f" (the first {most} of {len(left)}; the report has all)" if len(left) > most else ""
        print(f"\nWhat to try next{more}:")
    for number, line in enumerate(left[:most], start=1):
        print(textwrap.fill(f"{number}. {line}", width=100, subsequent_indent="   "))


def _cost(cost: Mapping[str, Any]) -> str:
    runs = cost.get("baseline_runs")
    share = "" if runs is None else f", as much as {runs:.1f} baseline runs"
    return f"{cost.get('steps', 0):,} steps in {cost.get('trials', 0)} trials, {cost.get('seconds', 0.0):.0f} s of training{share}"


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


def _describe(args: argparse.Namespace) -> int:
    from workbench.notebook_runner import describe_notebook

    print(describe_notebook(args.notebook))
    return RAN


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


def _report_command(args: argparse.Namespace) -> int:
    from workbench.record import open_record
    from workbench.report import write_report

    record = open_record(args.dir)
    print(f"Report: {write_report(record, _diagnosis_of(record), args.dir)}")
    return RAN


def _diagnosis_of(record: StudyRecord | TrialRecord) -> Diagnosis:
    """Return the diagnosis kept with a study, or what can be said of one that has none yet."""
    from workbench.diagnostics.instability import diagnose_instability
    from workbench.diagnostics.lr_sweep import diagnose_lr_sweep
    from workbench.diagnostics.stored import read_diagnosis
    from workbench.playbook import diagnose_record
    from workbench.record import StudyRecord

    if (record.path / "diagnosis.json").exists():
        return read_diagnosis(record.path)
    if isinstance(record, StudyRecord) and record.study.get("kind") == "diagnosis":
        return diagnose_record(record)  # interrupted: what can be said so far
    return diagnose_lr_sweep(record) + diagnose_instability(record)


def _studies(args: argparse.Namespace) -> int:
    from workbench.ledger import list_studies, rebuild

    extra = [name.strip() for name in args.columns.split(",") if name.strip()]
    if args.rebuild:
        rebuild(args.dir, ledger=args.ledger or None)
    table = list_studies(args.dir, extra=extra, ledger=args.ledger)
    where = args.dir if args.ledger is None else "the shared ledger"
    print(_study_lines(table, extra) if len(table) else f"No studies in {where}: workbench diagnose makes one.")
    if args.export:
        from workbench.ledger_export import export_studies

        print(f"Table: {export_studies(args.export, args.dir, extra=extra, ledger=args.ledger)}")
    return RAN


def _study_lines(table: pd.DataFrame, extra: Sequence[str] = ()) -> str:
    """One row a study, and under each where its config is and what reproduces it: together too wide for a terminal."""
    rows = [("study", "trials", "best value", "note")]
    rows += [(str(r.study), str(r.trials), f"{r.best_value:.4g}", str(r.note)) for r in table.itertuples()]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    shown = [f"{a:<{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}  {d}" for a, b, c, d in rows]
    below = [""] + [f"\n    config:    {r.config}\n    reproduce: {r.reproduce}" for r in table.itertuples()]
    for name in extra:
        values = [""] + [f"\n    {f'{name}:':<10} {value}" for value in table[name]]
        below = ["".join(pair) for pair in zip(below, values, strict=True)]
    return "\n".join(map("".join, zip(shown, below, strict=True)))


def _hosts(args: argparse.Namespace) -> int:
    if args.script is None and len(args.rest) != 1:
        given = shlex.join(args.rest) or "nothing"
        raise UsageError(
            f"workbench hosts needs one WORKLOAD, or --script FILE with its own arguments behind --; given: {given}."
        )
    from workbench.hosts.launch import cores
    from workbench.playbook_hosts import rehearse

    if args.hosts > cores():
        note = f"{args.hosts} hosts share {cores()} cores here: what they do is right, how long it takes says little"
        print(f"workbench: {note}.", file=sys.stderr)
    diagnosis, areas = rehearse(
        args.rest[0] if args.script is None else args.script,
        arguments=None if args.script is None else args.rest,
        hosts=args.hosts,
        steps=args.steps,
        timeout_s=args.timeout,
        port=args.port,
        out=args.out,
        command=shlex.join(["workbench", *args.words]),
    )
    print(diagnosis)
    print("\nThe five areas:", *(f"  {area:<14} {status}" for area, status in areas.items()), sep="\n")
    print(f"\nCost:      {diagnosis.cost['seconds']:.0f} s, the start of {diagnosis.cost['hosts']} processes included")
    print(f"Reproduce: {diagnosis.command}")
    print(f"Facts:     {diagnosis.path}")
    return VERDICT if args.fail_on and diagnosis.verdict in _AT_OR_ABOVE[args.fail_on] else RAN


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


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return USAGE


def _report(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        said = " ".join(str(error).split()) or "what was measured is kept, and the same command goes on from there."
        print(f"workbench: interrupted: {said}", file=sys.stderr)
        return INTERRUPTED
    said = " ".join(str(error).split()) or type(error).__name__
    hint = "" if isinstance(error, WorkbenchError) else " (WORKBENCH_DEBUG=1 shows where)"
    print(f"workbench: {said}{hint}", file=sys.stderr)
    return USAGE if isinstance(error, UsageError) else FAILED
