"""`workbench diagnose`: its options, and what it prints at the end."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbench.cli.verdict import add_fail_on, command_line, exit_code
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.findings.diagnosis import Diagnosis
    from workbench.train.trainer import AnyTrainer

__all__ = ["add_diagnose"]


def add_diagnose(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench diagnose`."""
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
    parser.add_argument(
        "--trainer", metavar="T", default="local", help="how a trial is run: local, parameter_server (default: local)"
    )
    add_fail_on(parser)
    parser.set_defaults(command=_diagnose)


def _diagnose(args: argparse.Namespace) -> int:
    if args.note is not None and not args.note.strip():
        raise UsageError(
            "--note is empty: say in a few words why this is run, or leave --note out for a generated one."
        )
    if args.steps is not None and args.steps < 1:
        raise UsageError(f"--steps {args.steps} must be at least 1; leave it out for the workload's own.")
    if args.trainer not in ("local", "parameter_server"):
        raise UsageError(f"--trainer {args.trainer!r} is not there. Allowed: local, parameter_server.")
    from workbench.playbook.walk import diagnose

    diagnosis = diagnose(
        args.workload,
        out=args.out,
        steps=args.steps,
        study=args.study,
        note=args.note,
        device=args.device,
        trainer=_trainer(args.trainer),
        executor=args.executor,
        address=args.address,
        proof_seeds=args.seeds,
        command=command_line(args),
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
    return exit_code(diagnosis, args.fail_on)


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
    share = "" if runs is None else f", as long as {runs:.1f} baseline runs take"
    return f"{cost.get('steps', 0):,} steps in {cost.get('trials', 0)} trials, {cost.get('seconds', 0.0):.0f} s of training{share}"


def _trainer(name: str) -> AnyTrainer | None:
    """Return the trainer of this name; None is the local one."""
    if name == "local":
        return None
    from workbench.parameter_server.trials.trainer import ParameterServerTrainer

    return ParameterServerTrainer()
