"""`workbench input`: its options, and what it prints at the end."""

from __future__ import annotations

import argparse

from workbench.cli.verdict import add_fail_on, command_line, exit_code

__all__ = ["add_input"]


def add_input(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench input`."""
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
    add_fail_on(parser)
    parser.set_defaults(command=_input)


def _input(args: argparse.Namespace) -> int:
    from workbench.topics.input.command import examine_input

    diagnosis = examine_input(
        args.target,
        step=args.step if args.step is not None else args.step_s,
        out=args.out,
        device=args.device,
        seconds=args.seconds,
        max_workers=args.max_workers,
        timeout_s=args.timeout,
        command=command_line(args),
    )
    print(diagnosis.brief)
    advice = diagnosis.advised("input.bound")
    if advice:
        print(advice)
    if diagnosis.path is not None:
        print(f"Folder: {diagnosis.path}")
    return exit_code(diagnosis, args.fail_on)
