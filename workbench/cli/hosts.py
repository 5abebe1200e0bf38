"""`workbench hosts`: its options, and what it prints at the end."""

from __future__ import annotations

import argparse
import shlex
import sys

from workbench.cli.verdict import add_fail_on, command_line, exit_code
from workbench.errors import UsageError

__all__ = ["add_hosts"]


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench hosts`."""
    parser.add_argument(
        "rest",
        metavar="WORKLOAD",
        nargs="*",
        help="as for diagnose; with --script, behind --, the script's own arguments",
    )
    parser.add_argument("--script", metavar="FILE", help="a training script of your own, as torchrun would start it")
    parser.add_argument(
        "--hosts", metavar="N", type=int, default=4, help="processes that train together, 2 or more (default: 4)"
    )
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
    add_fail_on(parser)
    parser.set_defaults(command=_hosts)


def _hosts(args: argparse.Namespace) -> int:
    if args.script is None and len(args.rest) != 1:
        given = shlex.join(args.rest) or "nothing"
        raise UsageError(
            f"workbench hosts needs one WORKLOAD, or --script FILE with its own arguments behind --; given: {given}."
        )
    from workbench.topics.hosts.launch import cores
    from workbench.topics.hosts.study import rehearse

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
        command=command_line(args),
    )
    print(diagnosis.brief)
    advice = diagnosis.advised()
    if advice:
        print(advice)
    print("\nThe five areas:", *(f"  {area:<14} {status}" for area, status in areas.items()), sep="\n")
    print(f"\nCost:      {diagnosis.cost['seconds']:.0f} s, the start of {diagnosis.cost['hosts']} processes included")
    print(f"Reproduce: {diagnosis.command}")
    print(f"Facts:     {diagnosis.path}")
    return exit_code(diagnosis, args.fail_on)
