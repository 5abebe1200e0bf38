"""`workbench report` and `studies`: what has been run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.verdict import RAN

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["add_report", "add_studies"]


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench report`."""
    parser.add_argument("dir", metavar="DIR", help="folder of a study")
    parser.set_defaults(command=_report_command)


def _report_command(args: argparse.Namespace) -> int:
    from workbench.playbook.records import diagnosis_of
    from workbench.record.read import open_record
    from workbench.report.page import write_report

    record = open_record(args.dir)
    print(f"Report: {write_report(record, diagnosis_of(record), args.dir)}")
    return RAN


def add_studies(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench studies`."""
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
    parser.add_argument("--note", metavar=("STUDY", "TEXT"), nargs=2, help="write another note to a study, and list")
    parser.set_defaults(command=_studies)


def _studies(args: argparse.Namespace) -> int:
    from workbench.ledger.studies import export_studies, list_studies, set_note

    if args.note:
        given = Path(args.note[0])
        set_note(given if (given / "study.json").exists() else Path(args.dir) / given, args.note[1])
    extra = [name.strip() for name in args.columns.split(",") if name.strip()]
    if args.rebuild:
        from workbench.ledger.push import rebuild

        rebuild(args.dir, ledger=args.ledger or None)
    table = list_studies(args.dir, extra=extra, ledger=args.ledger)
    where = args.dir if args.ledger is None else "the shared ledger"
    print(_study_lines(table, extra) if len(table) else f"No studies in {where}: workbench diagnose makes one.")
    if args.export:
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
