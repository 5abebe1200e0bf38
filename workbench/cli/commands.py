"""`workbench diagnose`, `judge`, `input`, `hosts`, `report`, `studies` and `ps`: what they call, what they print at the end, and their exit codes."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from workbench.cli.help import AT_OR_ABOVE, FOR_COMMAND, FOR_WORKLOAD, HELP
from workbench.cli.signals import ended_like_ctrl_c
from workbench.errors import UsageError, WorkbenchError

if TYPE_CHECKING:
    import pandas as pd

    from workbench.cli.help import Option
    from workbench.findings.diagnosis import Diagnosis

RAN, FAILED, USAGE, VERDICT, INTERRUPTED = 0, 1, 2, 3, 130


def exit_code(statuses: Iterable[str], fail_on: str | None) -> int:
    """Return `VERDICT` where the status of a finding is at or above `--fail-on`, else `RAN`.

    Raises:
        WorkbenchError: `--fail-on` was given, and nothing was measured that it could be held against.
    """
    found = set(statuses)
    if fail_on and found <= {"not_measured"}:
        raise WorkbenchError("--fail-on was given, and the command reached no verdict: nothing was measured.")
    return VERDICT if fail_on and not found.isdisjoint(AT_OR_ABOVE[fail_on]) else RAN


def _typed(args: argparse.Namespace) -> str:
    """Return the command as it was typed, which reproduces what it did."""
    return shlex.join(["workbench", *args.words])


def diagnose(args: argparse.Namespace) -> int:
    """Walk the playbook, and print verdict, config, the next steps and where the report is."""
    if args.note is not None and not args.note.strip():
        raise UsageError(
            "--note is empty: say in a few words why this is run, or leave --note out for a generated one."
        )
    _check_steps(args)
    if "--" in args.words:
        words = args.words[args.words.index("--") + 1 :]
        with ended_like_ctrl_c():
            found = _program(args, words)
        return _show_diagnosis(found, args)
    _check_workload(args)
    trainer = None
    if args.trainer == "parameter_server":
        from workbench.parameter_server.training.trainer import ParameterServerTrainer

        trainer = ParameterServerTrainer(device=args.device)
    from workbench.playbook.diagnose import diagnose as walk

    diagnosis = walk(
        args.workload,
        out=args.out,
        steps=args.steps,
        study=args.study,
        note=args.note,
        device=args.device,
        trainer=trainer,
        executor=args.executor,
        address=args.address,
        proof_seeds=args.seeds,
        budget=args.budget,
        command=_typed(args),
        progress=True,
    )
    return _show_diagnosis(diagnosis, args)


def _check_steps(args: argparse.Namespace) -> None:
    if args.steps is not None and args.steps < 1:
        raise UsageError(f"--steps {args.steps} must be at least 1; leave it out for the workload's own.")


def _given(args: argparse.Namespace, heading: str) -> str | None:
    """Return the first option below a heading of the help of `diagnose` that is not at its default."""
    options = HELP["diagnose"].options
    for option in takewhile(lambda option: not isinstance(option, str), options[options.index(heading) + 1 :]):
        names, more = cast("Option", option)
        usual = more.get("default", False if "action" in more else None)
        if getattr(args, names[0].strip("-").replace("-", "_"), usual) != usual:
            return names[0]
    return None


def _check_workload(args: argparse.Namespace) -> None:
    """Refuse what is not exactly one workload, and options of a command."""
    if wrong := _given(args, FOR_COMMAND):
        metric = "; a workload names its metric in its config: select='validation/accuracy'" * ("metric" in wrong)
        raise UsageError(f"{wrong} is {FOR_COMMAND}{metric or ': leave it out for a workload'}.")
    if args.rest:
        raise UsageError(
            f"one WORKLOAD is diagnosed at a time; given: {shlex.join([args.workload, *args.rest])}. A command that trains goes after --."
        )
    if args.workload is None:
        raise UsageError(
            "give a WORKLOAD, or a command that trains after --, as in `workbench diagnose -- python train.py`."
        )


def _check_command(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Refuse a workload beside a command, and options of one."""
    both = "WORKLOAD" if [args.workload, *args.rest] not in (list(words), [None]) else None
    if wrong := both or _given(args, FOR_WORKLOAD):
        raise UsageError(f"{wrong} is for a workload, and a command was given after --: leave one of them out.")


def _program(args: argparse.Namespace, words: Sequence[str]) -> Diagnosis:
    """Diagnose a command, with the options that are for one."""
    from workbench.playbook.program import diagnose_program

    _check_command(args, words)
    return diagnose_program(
        words, out=args.out, steps=args.steps, metric=args.metric, metric_mode=args.metric_mode, seeds=args.seeds, seed_arg=args.seed_arg,
        redirect=args.redirect, copy=args.copy, jobs=args.jobs, threads=args.threads, timeout_s=args.timeout, name=args.study, note=args.note,
        budget=args.budget, executor=args.executor, address=args.address, command=_typed(args), progress=True,
    )  # fmt: skip


def plan(args: argparse.Namespace) -> int:
    """Print what `diagnose` with the same arguments would train, what it would tell, and its price; train a few updates for the price."""
    _check_steps(args)
    from workbench.playbook.plan import plan_diagnosis, plan_program
    from workbench.studies.budget import Budget

    if "--" in args.words:
        _check_command(args, args.words[args.words.index("--") + 1 :])
        print(plan_program(Budget.of(args.budget, args.seeds), seeds=args.seeds))
        return RAN
    _check_workload(args)
    from workbench.train.trainer import Trainer
    from workbench.workloads.registry import load_workload

    budget = Budget.of(args.budget, args.seeds)
    print(plan_diagnosis(load_workload(args.workload), budget=budget, steps=args.steps, proof_seeds=args.seeds, trainer=Trainer(device=args.device)))  # fmt: skip
    return RAN


def _show_diagnosis(diagnosis: Diagnosis, args: argparse.Namespace) -> int:
    """Print a diagnosis and what it cost; return the exit code."""
    from workbench.plots.words import counted

    print(diagnosis)
    cost = diagnosis.cost
    runs = cost.get("baseline_runs")
    share = "" if runs is None else f", the updates of {runs:.1f} baseline runs"
    short = f" ({cost['short']} of them short)" if cost.get("short") else ""
    trained = f"{counted(cost.get('trials', 0), 'trial')}{short}, {cost.get('seconds', 0.0):.0f} s of training"
    spent = f"{counted(cost.get('steps', 0), 'step')} in {trained}"
    print(f"\nCost:      {spent}{share}")
    if cost.get("processes"):
        print(f"           {cost['processes']}")
    print(f"Reproduce: {diagnosis.command}")
    if diagnosis.path is not None:
        print(f"Report:    {diagnosis.path / 'report.html'}")
        if args.open:
            import webbrowser

            webbrowser.open((diagnosis.path / "report.html").resolve().as_uri())
    return exit_code([f.status for f in diagnosis], args.fail_on)


def judge(args: argparse.Namespace) -> int:
    """Read logs of runs made elsewhere, and print the verdict, what would help and what was read."""
    from workbench.logs.read import read_log
    from workbench.playbook.judge import judge as judged
    from workbench.playbook.judge import without_the_rest
    from workbench.plots.words import counted

    record = read_log(
        args.path,
        loss=args.loss,
        lr=_number_or_name(args.lr),
        step=args.step,
        grad_norm=args.grad_norm,
        validation=args.validation,
        max_grad_norm=args.max_grad_norm,
        total_steps=args.steps,
    )
    diagnosis = judged(record, out=args.out, command=_typed(args))
    told, rest = without_the_rest(diagnosis)
    print(told)
    print(f"\nRead:      {record.workload}, {counted(len(record.trials), 'run')}\n{str(record).partition(chr(10))[2]}")
    for log in record.facts["log"]:
        for note in log["notes"]:
            print(textwrap.fill(f"Note:      {log['file']}: {note}.", 100, subsequent_indent=" " * 11))
    print(
        f"Not seen:  {rest} more checks need the model or its data, which no log holds; workbench diagnose makes them"
    )
    report = "none; --out FOLDER writes one, with the figures and the evidence"
    print(f"Report:    {diagnosis.path / 'report.html' if diagnosis.path else report}")
    return exit_code([f.status for f in diagnosis], args.fail_on)


def _number_or_name(text: str | None) -> str | float | None:
    """Return a learning rate that was typed as a number, else the name of a column."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def input_pipeline(args: argparse.Namespace) -> int:
    """Time a loader and its step, and print the verdict and what would help."""
    from workbench.topics.input.study import examine_input

    diagnosis = examine_input(
        args.target,
        step=args.step if args.step is not None else args.step_s,
        out=args.out,
        device=args.device,
        seconds=args.seconds,
        max_workers=args.max_workers,
        timeout_s=args.timeout,
        command=_typed(args),
    )
    print(diagnosis)
    print(f"\nReproduce: {diagnosis.command}")
    if diagnosis.path is not None:
        print(f"Folder:    {diagnosis.path}")
    return exit_code([f.status for f in diagnosis], args.fail_on)


def hosts(args: argparse.Namespace) -> int:
    """Rehearse training on several processes, and print the verdict, its five areas and where the facts are."""
    if args.script is None and len(args.rest) != 1:
        given = shlex.join(args.rest) or "nothing"
        raise UsageError(
            f"workbench hosts needs one WORKLOAD, or --script FILE with its own arguments after --; given: {given}."
        )
    from workbench.topics.hosts.study import rehearse
    from workbench.train.lanes.threads import cores

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
        command=_typed(args),
    )
    print(diagnosis)
    print("\nThe five areas:", *(f"  {area:<14} {status}" for area, status in areas.items()), sep="\n")
    print(f"\nCost:      {diagnosis.cost['seconds']:.0f} s, the start of {diagnosis.cost['hosts']} processes included")
    print(f"Reproduce: {diagnosis.command}")
    print(f"Folder:    {diagnosis.path}")
    return exit_code([f.status for f in diagnosis], args.fail_on)


def report(args: argparse.Namespace) -> int:
    """Write a study's report again from what is on disk."""
    from workbench.playbook import diagnosis_of
    from workbench.record.missing import missing
    from workbench.record.read import no_study, open_record
    from workbench.report.write import write_report

    if not (Path(args.dir) / "study.json").is_file():
        raise UsageError(str(no_study(Path(args.dir))))
    record = open_record(args.dir)
    print(f"Report: {write_report(record, diagnosis_of(record), args.dir)}")
    return FAILED if missing(args.dir) else RAN


def watch(args: argparse.Namespace) -> int:
    """Serve a page that follows a study, until Ctrl-C."""
    import time
    import webbrowser

    from workbench.record.read import no_study
    from workbench.views.watch_page import serving

    if not Path(args.dir).is_dir():
        raise UsageError(str(no_study(Path(args.dir))))
    with serving(Path(args.dir), port=args.port) as server:
        print(f"Open {server.address}\nCtrl-C ends it; the study is not touched.", flush=True)
        if args.open:
            webbrowser.open(server.address)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return RAN


def studies(args: argparse.Namespace) -> int:
    """List what was run, after writing a note, or copying studies to a database, where that is asked for."""
    from workbench.ledger.studies import export_studies, list_studies, set_note
    from workbench.record.folder import runs_root

    args.dir = args.dir or str(runs_root())
    if args.note:
        set_note(_study_folder(args.dir, args.note[0]), args.note[1])
    if args.compare:
        from workbench.views.studies_data import compare, side

        found = compare([side(_study_folder(args.dir, name)) for name in args.compare])
        rows = [[name, *map(_short, values)] for name, *values in found["rows"]]
        print(textwrap.fill(found["said"], 110), "", *_columns([("", *found["names"]), *rows]), sep="\n")
        return RAN
    if not Path(args.dir).is_dir():
        raise UsageError(
            f"there is no folder {args.dir}: workbench diagnose makes one, or give another: workbench studies DIR."
        )
    extra = [name.strip() for name in args.columns.split(",") if name.strip()]
    if args.push:
        from workbench.ledger.push import push_studies

        print(f"{push_studies(args.push, Path(args.dir))} studies are in the database.")
    known = [name for name in _SHOWN if name not in extra]
    table = list_studies(args.dir, extra=[*extra, *known])
    nothing = f"No studies in {args.dir}: workbench diagnose makes one."
    if args.tag:
        tag = f"#{args.tag.lstrip('#')}"
        table = table[[tag in str(tags).split() for tags in table["tags"]]]
        nothing = f"No study in {args.dir} has the tag {tag}: a tag is a word of a note that begins with #."
    print(_study_lines(table, extra, args.verbose) if len(table) else nothing)
    if args.export:
        print(f"Table: {export_studies(args.export, args.dir, extra=extra)}")
    return RAN


_SHOWN = ("left", "select", "best_lr", "seeds", "mean_value", "verdict", "alarms", "lr_best", "lr_unstable", "tags")


def _study_folder(root: str, given: str) -> Path:
    """Return the folder of a study that was given by its path, or by its name in `root`."""
    found = [path for path in (Path(given), Path(root) / given) if (path / "study.json").exists()]
    if not found:
        raise UsageError(
            f"there is no study {given!r}, here or in {root}: give a folder, or a name that workbench studies lists."
        )
    return found[0]


def _short(value: object) -> object:
    """Return a value with the middle of a long text left out."""
    text = str(value)
    return f"{text[:24]} … {text[-12:]}" if isinstance(value, str) and len(text) > 40 else value


def _columns(rows: Sequence[Sequence[object]]) -> list[str]:
    """Return rows as lines, each column as wide as its widest value; the last one is not padded."""
    cells = [[_number(value) or ("" if value is None else str(value)) for value in row] for row in rows]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{text:<{width}}" for text, width in zip(row, wide, strict=True)).rstrip() for row in cells]


def _study_lines(table: pd.DataFrame, extra: Sequence[str], verbose: bool) -> str:
    """One row a study; under each its verdict and note and, where asked for, further columns, where its config is and what reproduces it."""
    from workbench.ledger.table import verdict_text

    rows = [("study", "trials", "value", "metric", "at lr", "lr.best", "lr.unstable")]
    for row in table.to_dict("records"):
        metric = str(row["select"]).partition(" ")[0]
        rows.append((
            str(row["study"]), str(row["trials"]), _number(row["mean_value"]) + f", mean of {row['seeds']} seeds" * (row["seeds"] > 1), metric if row["seeds"] else "",
            _number(row["best_lr"]), _number(row["lr_best"]), _number(row["lr_unstable"]),
        ))  # fmt: skip
    lines = _columns(rows)
    for line, study in enumerate(table.to_dict("records"), start=1):
        said = ": ".join(filter(None, (verdict_text(study), str(study["left"]), str(study["note"]))))
        lines[line] += f"\n    {said if verbose else textwrap.shorten(said, 106, placeholder=' …')}"
        lines[line] += "".join(f"\n    {f'{name}:':<10} {study[name]}" for name in extra)
        if verbose:
            lines[line] += f"\n    config:    {study['config']}\n    reproduce: {study['reproduce']}"
    if table["verdict"].notna().any():
        lines += ["", _COLUMNS_SAID]
    return "\n".join(lines)


_COLUMNS_SAID = """value, at lr: of the config that the diagnosis ends with, mean over its seeds; single trials may be better.
lr.best: by training loss; the config has it only where the metric proves it better."""


def _number(value: object) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else ""
    )
