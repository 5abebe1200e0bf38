"""`open_program`: a study whose trials are runs of a command or a function, begun with an unchanged one."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from workbench.config import TrainConfig
from workbench.curves.minimised import need_not_fall
from workbench.curves.trial_curves import one_batch
from workbench.errors import UsageError
from workbench.findings.first_look import FIRST_LOOK
from workbench.programs.command import Command, Outcome, printed_last
from workbench.programs.layout import FIRST_RUN
from workbench.programs.own_config import own_config, own_optimizer, own_schedule, own_threshold
from workbench.programs.trainer import (
    SPLIT,
    UNCHANGED,
    Program,
    ProgramTrainer,
    Repeatable,
    first_run,
    place_of,
    write_outcome,
)
from workbench.progress import interruptible, progress_bar
from workbench.record.folder import default_folder, read_json, unfinished
from workbench.record.metrics import larger_is_better
from workbench.record.roles import Role
from workbench.record.write import StudyWriter
from workbench.studies.budget import Budget
from workbench.studies.session import Session, say_resumed

LOGGED = "validation/loss"
"""What runs are compared by where it is logged, or printed twice or more, and nothing else was asked for."""
_APART = "[^A-Za-z0-9]"
PRINTED_LOSS = (
    rf"(?i)(?<![A-Za-z0-9])(?:{SPLIT}(?:{_APART}{{0,3}}|{_APART}{{1,3}}(?:[A-Za-z]+{_APART}{{1,3}}){{1,2}})loss|loss{_APART}{{1,3}}{SPLIT})"
    rf"[^A-Za-z0-9+-]{{0,5}}([+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|nan|inf))"
)
"""A validation loss in a line that a program prints: "val loss 0.31", "Validation set: average loss: 0.31", "loss/val=0.31"."""


def metric_of(metric: str | None, mode: str | None) -> tuple[dict[str, str], str, str]:
    """Return the patterns to look for, what is selected by and in which direction."""
    if mode not in (None, "min", "max"):
        raise UsageError(f"metric_mode={mode!r} must be 'min' or 'max'.")
    if metric is None:
        return {"validation_loss": PRINTED_LOSS}, "train/loss", "min"
    if metric == "train_loss":
        return {}, "train/loss", "min"
    try:
        groups = re.compile(metric).groups
    except re.error as error:
        raise UsageError(
            f"metric={metric!r} is not a regular expression ({error}); an example: 'val loss ([0-9.]+)'."
        ) from error
    label = re.sub(r"\W+", "_", re.split(r"\(", metric)[0]).strip("_").lower() or "metric"
    mode = mode or ("max" if larger_is_better(label) else "min")
    if groups == 0 and re.fullmatch(r"\w+", metric):
        return {}, "/".join(place_of(metric)), mode  # the program gives it to wb.log
    if groups == 0:
        raise UsageError(f"metric={metric!r} has no group that holds the value; write it as 'val loss ([0-9.]+)'.")
    return {label: metric}, "/".join(place_of(label)), mode


_TWICE = 2
"""Lines that print a value, which is a result where it is printed once: for a pattern to be told, or a validation loss to be compared (rule of thumb)."""
_LOOK_S = 2.0


def near_miss(pattern: str, lines: Sequence[str]) -> str | None:
    """Return a pattern for what these lines print before a number in the words of `pattern`, or shorter or longer ones, as "acc" for "accuracy"; None where it matches one, or none is near."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\\.|\[[^]]*\]", " ", pattern.partition("(")[0]).lower())
    if not words or any(re.search(pattern, line) for line in lines):
        return None
    return _printed(lines, len(words), lambda *printed: all(map(_alike, words, printed)))


def printed_score(lines: Sequence[str]) -> str | None:
    """Return the pattern of a validation score, as an accuracy, that these lines print, None where fewer than two of them do."""
    return _printed(lines, 2, lambda split, name: bool(re.fullmatch(SPLIT, split)) and larger_is_better(name))


def _printed(lines: Sequence[str], words: int, fits: Callable[..., bool]) -> str | None:
    """Return the pattern of a number that two of these lines or more print after so many words that fit, None without one."""
    word = "[A-Za-z][A-Za-z0-9]*"
    before = rf"(?<![A-Za-z0-9_]){word}(?:[^A-Za-z0-9]{{1,3}}{word}){{{words - 1}}}[^A-Za-z0-9+-]{{0,5}}(?=[+-]?\d)"
    labels = [label for line in lines for label in re.findall(before, line)]
    found = [each for each in labels if labels.count(each) >= _TWICE and fits(*re.findall("[a-z0-9]+", each.lower()))]
    return re.sub(r"\\(?=[ =:])", "", re.escape(found[0])) + "([0-9.eE+-]+)" if found else None


def _alike(one: str, other: str, *, least: int = 3) -> bool:
    """Tell whether two words are the same, or one is how the other begins, of `least` letters or more (rule of thumb)."""
    return one == other or (min(len(one), len(other)) >= least and (one.startswith(other) or other.startswith(one)))


@contextmanager
def _told_of_near_miss(given: Repeatable, metric: str | None, told: Path) -> Iterator[None]:
    """Say it once the run in the block prints the metric in another way than its pattern has it; whether it waits for the end is the person's choice."""
    done = threading.Event()

    def look() -> None:
        pattern, lines, read = next(iter(given.patterns.values())), list[str](), 0
        while not done.wait(_LOOK_S):
            with suppress(OSError), (told / "output.txt").open(errors="replace") as file:
                file.seek(read)
                lines += [line for line in file.read().splitlines() if any(c.isdigit() for c in line)]
                read = file.tell()
            if any(re.search(pattern, line) for line in lines):
                return
            better = near_miss(pattern, lines)
            if better is not None:
                print(
                    f"\nThe metric {pattern!r} matches no line so far; for one with its words: {better!r}. Ctrl-C ends the run.",
                    file=sys.stderr,
                )
                return

    watcher = threading.Thread(target=look, name="metric", daemon=True)
    if given.patterns and metric is not None:
        watcher.start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def open_program(
    given: Repeatable, trainer: ProgramTrainer, out: str | Path | None, *, steps: int | None, select: str, mode: str, seeds: int, name: str | None,
    note: str | None, **options: Any,
) -> Iterator[ProgramSession]:  # fmt: skip
    """Open a study of a command or a function: run it unchanged first, or read what an interrupted call has found."""
    budget: Budget = options.get("budget") or Budget()
    budget.check_whole()
    settings = given.settings | {"steps": steps, "select": select, "mode": mode, "seeds": seeds}
    begun = unfinished(given.name, "program", {"workload": given.name, "settings": settings})
    path = Path(out) if out is not None else begun or default_folder(given.name, "program")
    outcome, cut = None, False
    if (path / "study.json").exists():
        config = TrainConfig.from_dict(_revived(read_json(path / "study.json")["config"]))
        facts = read_json(path / "study.json")["facts"]
        full, minimised = bool(facts.get("full_batch")), facts.get("minimised") is not False
        cut, main = FIRST_LOOK in facts, facts["loop"].get("judged")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=FIRST_RUN, dir=path.parent))
        try:
            with progress_bar(None, given.name, show=options.get("progress", False)) as bar:
                bar.status("the unchanged run")
                with _told_of_near_miss(given, options.get("metric"), scratch / "0" / "told"):
                    outcome = first_run(given, scratch / "0", steps=steps, threads=trainer.threads, stop_s=budget.run_s)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if options.get("metric") is None and _told(outcome).count(LOGGED) >= (_TWICE if given.patterns else 1):
            select = LOGGED
        _check_metric(given, outcome, options.get("metric"), select, budget)
        config = _config(outcome, select=select, select_mode=mode)
        full = one_batch(outcome.facts["loop"])
        cut = steps is None and bool(outcome.facts["stopped"]) and not outcome.facts["diverged"]
        minimised = need_not_fall(outcome.facts["loop"], outcome.columns) is None
        main = outcome.facts["loop"].get("judged")
    writer = StudyWriter.open(
        path, kind="program", workload=given.name, config=config.to_dict(), settings=settings, name=name,
        note=note or _note(given, outcome), command=options.get("command"), call=options.get("call"),
    )  # fmt: skip
    budget.look = cut
    program = Program(
        command=given,
        config=config,
        full_batch=full,
        endless=cut or steps is not None,
        minimised=minimised,
        training=main and main["wanted"],
    )
    try:
        if outcome is not None:
            trainer.keep(UNCHANGED, outcome)
            adopted = config.select == LOGGED and options.get("metric") is None
            _keep_first_run(writer, program, outcome, first_look=cut, adopted=adopted and isinstance(given, Command))
        show = options.get("progress", False)
        say_resumed(writer, show=show and outcome is None)
        with interruptible(writer.path), progress_bar(None, given.name, show=show) as bar:
            yield ProgramSession(program, config, trainer=trainer, executor=None, writer=writer, bar=bar, budget=budget)  # type: ignore[arg-type]
        writer.finish()
    finally:
        given.stop()
        writer.close()


def _keep_first_run(
    writer: StudyWriter, program: Program, outcome: Outcome, *, first_look: bool, adopted: bool
) -> None:
    """Write the unchanged run as the baseline, and what was seen in it."""
    config = program.config
    examples = config.batch_size if program.full_batch else 10**9
    write_outcome(writer.trial(config.to_dict(), stage=Role.BASELINE, train_examples=examples), config, outcome)
    facts = {k: outcome.facts[k] for k in ("seeded", "world", "threads", "fault")}
    facts |= {"built": outcome.facts.get("built", []), "adopted": adopted}
    if config.select == "train/loss" and isinstance(program.command, Command):
        facts["printed"] = printed_score(outcome.tail.splitlines())
    if first_look:
        writer.add_facts(**{FIRST_LOOK: {"steps": outcome.updates, "whole": None}})
    if not program.minimised:
        writer.add_facts(minimised=False, not_minimised=need_not_fall(outcome.facts["loop"], outcome.columns))
    writer.add_facts(
        loop=outcome.facts["loop"], program=facts, full_batch=program.full_batch, initial_critical_lr=config.peak_lr,
        initial_critical_lr_found=False, own_config=config.to_dict(),
    )  # fmt: skip


def _note(given: Repeatable, outcome: Outcome | None) -> str:
    facts = {} if outcome is None else outcome.facts
    seeded, judged = facts.get("seeded"), facts.get("loop", {}).get("judged")
    return (
        f"diagnosis of `{given.shown}`"
        + (f"; {judged['said']}" if judged else "")
        + (f"; each trial adds its own to the seeds set in {', '.join(seeded)}" if seeded else "")
    )


def _revived(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored fields with the functions that stand for the program's own."""
    found = dict(fields)
    for name, value in (("optimizer", own_optimizer), ("schedule", own_schedule)):
        if ":" in str(found[name]):
            found[name] = value
    return found


def _told(outcome: Outcome) -> list[str]:
    return ["/".join(place_of(str(row["name"]))) for row in outcome.metrics]


def _check_metric(command: Repeatable, outcome: Outcome, metric: str | None, select: str, budget: Budget) -> None:
    if select == "train/loss" or select in _told(outcome):
        return
    told = sorted({str(row["name"]) for row in outcome.metrics})
    if budget.run_s is not None and outcome.facts["stopped"]:
        raise UsageError(
            f"the budget of {budget.text} ended the first run after {outcome.updates} updates and a third of it, before metric={metric!r} was "
            "told. Give more time, or leave it out: the training loss is compared then."
        )
    missed = str(metric) if command.patterns else f"{metric}(?!)"  # a name is no pattern, and matches nothing
    better = near_miss(missed, outcome.tail.splitlines())
    fits = f" {better!r} fits what it printed." if better else ""
    if command.patterns:
        raise UsageError(
            f"metric={metric!r} matches no line with a number that the program printed in {outcome.updates} updates.{fits} It printed "
            f"last: {printed_last(outcome.tail)}"
        )
    raise UsageError(
        f"metric={metric!r}: the program gave wb.log no such value{f'; it gave {told}' if told else ''}.{fits or _GROUP}"
    )


_GROUP = " A pattern for what it prints needs a group, 'val loss ([0-9.]+)'."


class ProgramSession(Session):
    """The trials of a command: nothing about its model is known beforehand."""

    def check(self, configs: Sequence[TrainConfig]) -> dict[str, int]:
        """Return how many examples there are: nobody knows, unless every update sees them all."""
        program: Any = self.workload
        return {"train": configs[0].batch_size if program.full_batch else 10**9}


def _config(outcome: Outcome, **fields: Any) -> TrainConfig:
    """Return the config that an unchanged run shows; clipping by several thresholds or by value is left to it."""
    loop, lrs = outcome.facts["loop"], outcome.columns["lr"]
    alone = len(loop["order"]["limits"]) == 1
    found = own_config(
        loop["parameters"]["optimizers"]["0"],
        lrs,
        updates=outcome.updates,
        batch_size=loop["loaders"]["batch_size"],
        max_grad_norm=own_threshold(loop) if alone else None,
        **fields,
    )
    constant = np.allclose(np.asarray(lrs, dtype=np.float64), found.peak_lr, rtol=1e-6, equal_nan=True)
    return found if constant else found.replace(schedule=own_schedule)
