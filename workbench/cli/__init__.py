"""The `workbench` command: its words, and what the exit code says.

Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import traceback
from ast import literal_eval
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from workbench import __version__
from workbench.cli.commands import (
    FAILED,
    INTERRUPTED,
    USAGE,
    diagnose,
    hosts,
    input_pipeline,
    judge,
    plan,
    report,
    studies,
    watch,
)
from workbench.cli.help import EXIT_CODES, HELP, MAIN_HELP
from workbench.cli.notebooks import describe, lab, list_all, run
from workbench.cli.task import serve
from workbench.errors import UsageError, WorkbenchError, nearest

_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "diagnose": diagnose,
    "plan": plan,
    "judge": judge,
    "input": input_pipeline,
    "list": list_all,
    "describe": describe,
    "run": run,
    "report": report,
    "watch": watch,
    "studies": studies,
    "hosts": hosts,
    "ps": serve,
    "lab": lab,
}


def _joined(words: list[str]) -> list[str]:
    """Return the words with a value that begins with a minus joined to its option, as argparse takes it; those after "--" are another command's."""
    ours, joined = words.index("--") if "--" in words else len(words), list[str]()
    for word in words[:ours]:
        if re.match(r"-[\d.]", word) and joined and re.match(r"--\w[\w-]*$", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return [*joined, *words[ours:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = _joined(list(sys.argv[1:] if argv is None else argv))
    if words and not words[0].startswith("-") and words[0] not in _COMMANDS:
        print(f"workbench: {words[0]!r} is not a command.{nearest(words[0], _COMMANDS)}", file=sys.stderr)
        return USAGE
    try:
        args, unknown = build_parser().parse_known_args(words)
    except SystemExit as stop:  # argparse, after --help or a usage error
        return stop.code if isinstance(stop.code, int) else USAGE
    if unknown:
        options = _options(words[0])
        what = "an option" if unknown[0].startswith("-") else "expected here"
        print(f"workbench {words[0]}: {unknown[0]!r} is not {what}.{nearest(unknown[0], options)}", file=sys.stderr)
        return USAGE
    args.words = words
    try:
        code: int = args.command(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of `workbench list | head` has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if os.environ.get("WORKBENCH_DEBUG") == "1":
            raise
        return _report(error, _options(words[0]) if words and words[0] in HELP else [])
    return code


def _options(command: str) -> list[str]:
    given = [option for option in HELP[command].options if not isinstance(option, str)]
    each = [one for option in given for one in (option if isinstance(option, list) else [option])]
    return [name for names, _ in each for name in names if name.startswith("-")]


def _as_typed(said: str, options: Sequence[str]) -> str:
    """Return a message with what it says of a parameter, device='cpu', as the option that was typed, --device cpu."""
    names = {option.strip("-").replace("-", "_"): option for option in options}
    return re.sub(
        r"\b(\w+)=('(?:[^'\\]|\\.)*')",
        lambda m: f"{names[m[1]]} {shlex.quote(literal_eval(m[2]))}" if m[1] in names else m[0],
        said,
    )


_WORDS = {
    r"^argument ": "", r": expected one argument": " needs a value", r": expected (\S+) arguments?": r" needs \1 values",
    r": invalid int value: (.+)": r" takes an integer, not \1", r": invalid float value: (.+)": r" takes a number, not \1",
    "the following arguments are required: ": "give ",
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        for theirs, ours in _WORDS.items():
            message = re.sub(theirs, ours, message)
        self.exit(USAGE, f"{self.prog}: {message}. {self.prog} --help shows what it takes.\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="workbench", description=MAIN_HELP, epilog=EXIT_CODES, **style)
    version = f"workbench {__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version and stop")

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return USAGE

    parser.set_defaults(command=show_help)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, does in _COMMANDS.items():
        text = HELP[name]
        command = commands.add_parser(name, help=text.line, description=text.description, epilog=text.epilog, **style)
        command.set_defaults(command=does)
        heading: Any = command
        for option in text.options:
            if isinstance(option, str):
                heading = command.add_argument_group(option)
                continue
            group = heading.add_mutually_exclusive_group() if isinstance(option, list) else heading
            for names, more in option if isinstance(option, list) else [option]:
                group.add_argument(*names, **more)
    return parser


def _report(error: BaseException, options: Sequence[str]) -> int:
    if isinstance(error, KeyboardInterrupt):
        said = " ".join(str(error).split()) or "the same command goes on from what is kept."
        print(f"workbench: interrupted: {said}", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, SystemExit):  # its own code says nothing of what was asked for: exit(0) is no verdict
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in f.filename]
        error = WorkbenchError(
            f"{frames[-1].filename}:{frames[-1].lineno} (in {frames[-1].name}) ended the program with exit({error.code!r}), "
            "before the command was done. Raise an error there instead."
        )
    said = " ".join(str(error).split()) or type(error).__name__
    hint = "" if isinstance(error, WorkbenchError) else " (WORKBENCH_DEBUG=1 shows where)"
    print(f"workbench: {_as_typed(said, options)}{hint}", file=sys.stderr)
    return USAGE if isinstance(error, UsageError) else FAILED
