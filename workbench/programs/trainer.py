"""`Program` and `ProgramTrainer`: a command or a function as a workload whose trials are runs of it."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from workbench.config import TrainConfig
from workbench.errors import WorkbenchError
from workbench.instruments.log import split_of
from workbench.programs.command import Outcome, printed_last
from workbench.programs.own_config import CONSTANTS
from workbench.programs.trainings import chosen
from workbench.progress import Progress
from workbench.record.metrics import larger_is_better
from workbench.record.read import TrialRecord
from workbench.record.write import StudyWriter, TrialWriter
from workbench.train.hooks import Hook

WINDOWS = 10
"""Stretches of a run whose mean training loss stands in for evaluations where the program tells no metric."""
_GIVEN_UP = 3.0
"""Times its first losses that the last one of a run that ends itself is, where the program has given it up (rule of thumb)."""


class Repeatable(Protocol):
    """A training that is run as it is, as often as is needed: a `Command` or a `Function`."""

    @property
    def name(self) -> str:
        """Return a short name, also of the study's folder."""

    @property
    def shown(self) -> str:
        """Return what is run, in short."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return what tells it from another one, as JSON values."""

    @property
    def patterns(self) -> Mapping[str, str]:
        """Return the name of each metric that is looked for in what it prints, and its pattern."""

    @property
    def remark(self) -> str:
        """Return how its runs began, where a reader should know; "" where there is nothing to say."""

    def run(self, scratch: Path, trial: Mapping[str, Any], *, threads: int | None = None) -> Outcome:
        """Run it once, changed as `trial` says (see `trial_of`), and return what was seen."""

    def stop(self) -> None:
        """End the runs that are under way in other processes."""

    def failure(self, outcome: Outcome) -> WorkbenchError:
        """Return the error that says why a run is of no use, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is run and the config that its unchanged run shows.

    Attributes:
        config: `peak_lr` is the largest lr of the first parameter group, `total_steps` the updates of the whole run.
        full_batch: whether every update sees the same examples, all of them.
        endless: whether it is to be ended after `total_steps`, rather than by itself.
        training: which of its trainings is observed and changed, see `Trainings.wanted`.
    """

    command: Repeatable
    config: TrainConfig
    full_batch: bool = False
    endless: bool = False
    minimised: bool = True
    training: Sequence[Any] | None = None

    @property
    def name(self) -> str:
        """Return the name of the script, module or function."""
        return self.command.name


@dataclass(frozen=True, kw_only=True)
class ProgramTrainer:
    """Runs the trials of a `Program`.

    Attributes:
        jobs: runs at a time, each in processes of its own; None runs one after the other in this thread.
        threads: of torch in each; None leaves it to the program.
    """

    jobs: int | None = 1
    threads: int | None = None
    device: str = "cpu"
    hooks: Sequence[Hook] = ()
    track: int | Sequence[int] = 0
    evaluate_also: Sequence[str] = ()
    seen: dict[tuple[Any, ...], Outcome] = field(default_factory=dict, compare=False, repr=False)
    """The longest run so far of each change and seed: a shorter one begins in the same way, so that it need not be run."""

    def run_trials(
        self,
        workload: Any,
        configs: Sequence[TrainConfig],
        study: StudyWriter,
        *,
        stage: str,
        progress: Progress | None = None,
    ) -> list[TrialRecord]:
        """Run what is not finished yet and return all records, in the order of `configs`."""
        program: Program = workload
        examples = program.config.batch_size if program.full_batch else 10**9
        writers = [study.trial(c.to_dict(), stage=stage, train_examples=examples) for c in configs]
        todo = [(c, w) for c, w in zip(configs, writers, strict=True) if not w.finished]
        with tempfile.TemporaryDirectory(prefix="runs-", dir=study.path) as scratch:
            places = [(config, Path(scratch) / str(writer.number)) for config, writer in todo]
            for (config, writer), outcome in zip(todo, self._outcomes(program, places), strict=True):
                write_outcome(writer, config, outcome, own=program.config)
                if progress is not None:
                    progress(outcome.updates)
        return [writer.record for writer in writers]

    def _outcomes(self, program: Program, places: Sequence[tuple[TrainConfig, Path]]) -> Iterator[Outcome]:
        if self.jobs is None:
            yield from (self._run(program, config, scratch) for config, scratch in places)
            return
        with ThreadPoolExecutor(max(self.jobs, 1)) as pool:
            runs = [pool.submit(self._run, program, config, scratch) for config, scratch in places]
            try:
                yield from (run.result() for run in runs)
            except BaseException:
                for run in runs:
                    run.cancel()
                program.command.stop()
                raise

    def _run(self, program: Program, config: TrainConfig, scratch: Path) -> Outcome:
        trial = trial_of(config, program.config, endless=program.endless) | {"training": program.training}
        known = self.seen.get(_key(trial))
        if known is not None and trial["stop_after"] is not None and known.updates >= trial["stop_after"]:
            return _beginning(known, trial["stop_after"])
        outcome = program.command.run(scratch, trial, threads=self.threads)
        shutil.rmtree(scratch, ignore_errors=True)
        self.keep(trial, outcome)
        return outcome

    def keep(self, trial: Mapping[str, Any], outcome: Outcome) -> None:
        """Keep a run in memory, for shorter ones; one that did not go well is run again."""
        if outcome.code == 0 and not outcome.facts.get("fault"):
            self.seen[_key(trial)] = outcome


def _key(trial: Mapping[str, Any]) -> tuple[Any, ...]:
    changed = (trial["factor"], trial["warmup_steps"], trial["max_grad_norm"] or math.inf, trial["seed"])
    constants = json.dumps(trial.get("constants") or {}, sort_keys=True)
    return (*(float(f"{value:.9g}") for value in changed), bool(trial.get("unclipped")), constants)


def _beginning(outcome: Outcome, updates: int) -> Outcome:
    """Return the first updates of a run, as if it had been ended with the last of them; its time is counted once."""
    columns = {name: list(values)[:updates] for name, values in outcome.columns.items()}
    metrics = [row for row in outcome.metrics if row["update"] < updates]
    return replace(outcome, columns=columns, metrics=metrics, seconds=0.0)


def trial_of(config: TrainConfig, own: TrainConfig, *, endless: bool) -> dict[str, Any]:
    """Return what is done to a run of the program so that it trains by `config`."""
    return {
        "factor": config.peak_lr / own.peak_lr,
        "warmup_steps": config.warmup_steps,
        "max_grad_norm": None if config.max_grad_norm == own.max_grad_norm else config.max_grad_norm,
        "unclipped": own.max_grad_norm not in (None, config.max_grad_norm),
        "stop_after": config.total_steps if endless or config.total_steps < own.total_steps else None,
        "seed": config.shared_seed,
        "constants": replaced_constants(config, own),
    }


def replaced_constants(config: TrainConfig, own: TrainConfig) -> dict[str, Any]:
    """Return the constants of the update rule in which a config differs from the program's own, by their names in a parameter group."""
    found = {n: getattr(config, f) for n, f in CONSTANTS.items() if getattr(config, f) != getattr(own, f)}
    betas = [config.beta1, config.beta2]
    return found | ({"betas": betas} if betas != [own.beta1, own.beta2] else {})


def _rose(losses: Sequence[float]) -> bool:
    """Tell whether the last tenth of losses lies above the largest of the first one by more than its size, whatever their sign."""
    part = max(len(losses) // 10, 1)
    first, last = max(losses[:part], default=math.nan), float(np.mean(losses[-part:] or [math.nan]))
    return last - first > (_GIVEN_UP - 1.0) * abs(first)


def write_outcome(
    writer: TrialWriter, config: TrainConfig, outcome: Outcome, *, own: TrainConfig | None = None
) -> None:
    """Write the rows of a run and how it ended.

    A run that fails at a setting of ours where the unchanged one did not has diverged: losses and distributions that check their values
    raise when a model leaves the finite. So has one that ended itself early with a loss far above its first. One that was observed in part only has failed: what was done to it ended there too.
    """
    columns = {name: list(values)[: config.total_steps] for name, values in outcome.columns.items()}
    updates = len(columns.get("lr", ()))
    losses = columns.get("loss", [])
    named = ("peak_lr", "warmup_steps", "max_grad_norm", *CONSTANTS.values(), "beta1", "beta2")
    changed = own is not None and any(getattr(config, name) != getattr(own, name) for name in named)
    crashed = outcome.code != 0 and updates < config.total_steps
    event: dict[str, Any] = {"steps_run": updates, "seconds": outcome.seconds, "gradients": "program", "lanes": 1}
    fault = outcome.facts.get("fault")
    if fault:
        event["said"] = f"not observed to its end, an error in this package: {fault}"
    elif crashed:
        event["said"] = printed_last(outcome.tail)
    diverged = bool(losses) and not math.isfinite(losses[-1]) and not fault
    given_up = updates < config.total_steps and _rose(losses)
    if (crashed or given_up) and not fault and changed and updates and not diverged:
        columns = {name: [*values, math.nan if name != "lr" else values[-1]] for name, values in columns.items()}
        updates, diverged = updates + 1, True
    writer.rewind(0)
    if updates:
        writer.study.steps.add({"trial": [writer.number] * updates, "step": list(range(updates)), **columns})
    rows = evaluations(config, columns, outcome.metrics)
    if rows:
        names = ("step", "split", "metric", "value")
        count = len(rows)
        writer.study.evals.add(
            {"trial": [writer.number] * count, **{name: [row[i] for row in rows] for i, name in enumerate(names)}, "setting": ["periodic"] * count,
             "num_examples": [math.nan] * count, "num_correct": [math.nan] * count, "seconds": [math.nan] * count, "subset": [""] * count}
        )  # fmt: skip
    split, metric = config.select.split("/", 1)
    chosen = [(row[3], row[0]) for row in rows if (row[1], row[2]) == (split, metric) and math.isfinite(row[3])]
    if chosen:
        value, step = (min if config.select_mode == "min" else max)(chosen)
        event |= {"best_step": step, "best_value": value}
    if config.select == "train/loss" and (printed := printed_values(outcome.tail)):
        writer.study.add_facts(**{f"printed/{writer.number}": printed})
    state = "diverged" if diverged else "failed" if crashed or fault else "complete"
    writer.event("end", state=state, **event)
    writer.study.flush()


SPLIT = "(?:validation|valid|val|evaluation|eval|dev)"
"""What programs call the validation split in what they print."""
_PRINTED = re.compile(
    rf"\b({SPLIT}[ _/-]{{0,2}}[a-z]\w*|[a-z]\w*[ _/-]{SPLIT})\W{{0,4}}([+-]?\d+\.\d+(?:e[+-]?\d+)?)", re.IGNORECASE
)
_SMALLER = re.compile(r"loss|nll|mse|mae|rmse|ppl|perplexity|err|error|bpc")
"""Names of metrics that nobody wants large (rule of thumb)."""


def printed_values(text: str) -> dict[str, float]:
    """Return the best value of each validation metric that lines print, by its words, where these tell which side is better."""
    found: dict[str, list[float]] = {}
    for label, value in _PRINTED.findall(text):
        found.setdefault(re.sub(r"[\W_]+", " ", label).lower(), []).append(float(value))
    return {
        name: (max if larger else min)(values)
        for name, values in found.items()
        if (larger := larger_is_better(name.replace(" ", "_"))) or any(map(_SMALLER.fullmatch, name.split()))
    }


def place_of(name: str) -> tuple[str, str]:
    """Return split and metric of what the program calls `name`; the split "train" is that of the losses of its updates."""
    found = split_of(name)
    return ("validation", name) if found[0] == "train" else found


def evaluations(
    config: TrainConfig, columns: Mapping[str, Sequence[float]], metrics: Sequence[Mapping[str, Any]]
) -> list[tuple[int, str, str, float]]:
    """Return (step, split, metric, value) of what the program told, and the mean training loss of each tenth of the run."""
    rows = [(min(int(m["update"]), config.total_steps), *place_of(str(m["name"])), float(m["value"])) for m in metrics]
    losses = np.asarray(columns.get("loss", ()), dtype=np.float64)
    width = max(config.total_steps // WINDOWS, 1)
    for start in range(0, len(losses) - width + 1, width):
        rows.append((start + width, "train", "loss", float(np.mean(losses[start : start + width]))))
    return sorted(rows, key=lambda row: row[0])


UNCHANGED = {"factor": 1.0, "warmup_steps": 0, "max_grad_norm": None, "seed": 0}


def first_run(
    command: Repeatable, scratch: Path, *, steps: int | None, threads: int | None, stop_s: float | None = None
) -> Outcome:
    """Run it unchanged, for at most `stop_s` seconds of updates, and once more where that shows which of several trainings counts; return what was seen.

    Raises:
        WorkbenchError: it fails, no update of an optimizer was seen, or not all of them.
    """
    trial = UNCHANGED | {"stop_after": steps, "stop_s": stop_s}
    outcome = _seen(command, command.run(scratch, trial, threads=threads))
    main = chosen(outcome.facts.get("trainings", ()))
    if main is not None:
        again = command.run(scratch.with_name("main"), trial | {"training": main["wanted"]}, threads=threads)
        outcome = _seen(command, again)
        outcome.facts["loop"]["judged"] = main
    return outcome


def _seen(command: Repeatable, outcome: Outcome) -> Outcome:
    unseen = not outcome.updates or outcome.facts.get("fault") or "loop" not in outcome.facts
    if unseen or (outcome.code and not (outcome.facts.get("stopped") or outcome.facts.get("diverged"))):
        raise command.failure(outcome)
    return outcome
