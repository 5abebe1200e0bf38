"""What the commands share: the exit codes, and how a verdict becomes one."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.findings.diagnosis import Diagnosis

__all__ = ["FAILED", "INTERRUPTED", "RAN", "USAGE", "VERDICT", "add_fail_on", "command_line", "exit_code"]

RAN, FAILED, USAGE, VERDICT, INTERRUPTED = 0, 1, 2, 3, 130
_AT_OR_ABOVE = {"fail": ("fail",), "warn": ("fail", "warn")}


def add_fail_on(parser: argparse.ArgumentParser) -> None:
    """Add `--fail-on`, which makes a verdict an exit code."""
    parser.add_argument("--fail-on", choices=tuple(_AT_OR_ABOVE), help="exit with 3 on this verdict or a worse one")


def exit_code(found: Diagnosis | str, fail_on: str | None) -> int:
    """Return `VERDICT` where a diagnosis, or its verdict as a word, is at or above `--fail-on`, else `RAN`."""
    verdict = found if isinstance(found, str) else found.verdict
    return VERDICT if fail_on and verdict in _AT_OR_ABOVE[fail_on] else RAN


def command_line(args: argparse.Namespace) -> str:
    """Return the command as it was typed, which reproduces what it did."""
    return shlex.join(["workbench", *args.words])
