"""`Session`: one study folder being filled, trial after trial; what is already there is not trained again."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch

from workbench.config import TrainConfig
from workbench.errors import (
    ClusterError,
    RecordError,
    TargetError,
    UnknownNameError,
    UsageError,
    WorkbenchError,
    in_one_line,
    nearest,
)
from workbench.findings.audited import NOT_COLLECTED
from workbench.progress import ProgressBar, interruptible, progress_bar
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.roles import STAGES, Role
from workbench.record.write import StudyWriter
from workbench.studies.budget import Budget, BudgetSpent
from workbench.train.batches import resolve_device
from workbench.train.distributed.process_group import check_alone
from workbench.train.lane import check_lanes
from workbench.train.lanes.threads import step_threads
from workbench.train.trainer import AnyTrainer, Trainer, fingerprint
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_data, check_selection, check_workload

if TYPE_CHECKING:
    from workbench.studies.executors.on_ray import RayExecutor

EXECUTORS = ("local", "ray")


class Session:
    """The trials of one study as they are run; `config` is the baseline at the study's length.

    Attributes:
        executor: where trials run; None is this process.
    """

    def __init__(
        self,
        workload: Workload,
        config: TrainConfig,
        *,
        trainer: AnyTrainer,
        executor: RayExecutor | None,
        writer: StudyWriter,
        bar: ProgressBar,
        budget: Budget | None = None,
    ) -> None:
        self.workload, self.config, self.trainer, self.writer = workload, config, trainer, writer
        self.executor, self._bar, self.budget = executor, bar, budget or Budget()
        self._seen: set[int] = set()
        self._asked: set[TrainConfig] = set()
        if self.budget.runs < math.inf:
            trials = StudyRecord(writer.record.path).trials
            there = float(trials["steps_run"].sum()) / config.total_steps if len(trials) else 0.0
            if there > self.budget.runs * 1.001 and self.budget.default:
                self.budget = Budget.of(writer.record.facts.get("budget_given", "none"), 1)  # what it was trained with
            elif there > self.budget.runs * 1.001:
                raise UsageError(
                    f"budget={self.budget.text!r}: {writer.path} holds {there:.3g} baseline runs already, whose verdict a smaller budget would "
                    "replace. Give as much or more, leave the budget out, or give a new folder."
                )
        self._stage, self._at, self._planned = "", "", 0.0
        self._parts: tuple[str, ...] = ()
        self._reached = 0  # number of the last part that began
        if "replaced" in writer.record.facts:  # these trials are not asked for again
            trials = StudyRecord(writer.record.path).trials
            self._seen |= set(trials["trial"][trials["stage"] == Role.REPLACED].astype(int))
        if writer.record.facts.get("budget"):  # of an earlier call: what it did not pay for is judged anew
            self.facts(budget="")

    def plan(self, runs: float, parts: Sequence[str]) -> None:
        """Say how many baseline runs the study takes, about, for the bar to know its end, and the names of its parts."""
        self._planned, self._parts = min(runs, self.budget.runs), tuple(parts)
        self._expect()

    def _expect(self) -> None:
        """Tell bar and watchers where the study ends: at what was planned, or, where a time is given, at the runs that are left in it."""
        runs, run_s = self._planned, self.run_s if self.budget.seconds < math.inf else None
        if run_s:
            runs = min(runs, self._bar.done / self.config.total_steps + self.budget.left_s() / run_s)
        if runs:
            self._bar.expect(round(runs * self.config.total_steps))
        self.writer.plan(self._stage, round(runs * self.config.total_steps))

    def stage(self, part: str, detail: str = "") -> None:
        """Say which part of the plan begins, by how its name begins, or, with a detail, goes on as soon as a trial is asked for; of one that was not planned nothing is said."""
        self._at = detail or part
        for number, name in enumerate(self._parts, start=1):
            if name.startswith(part):
                more, again = detail and f": {detail}", " again" * (number < self._reached)  # with what a proof left
                self._reached = max(number, self._reached)
                self._stage = f"{self._reached} of {len(self._parts)}: {name}{again}{more}"
                if not detail:
                    self._expect()
                    self._bar.status(self._stage)

    def left_out(self, why: str) -> None:
        """Say which parts of the plan never began, and why."""
        if rest := self._parts[self._reached :]:
            self._bar.status(f"{len(self._parts)} of {len(self._parts)}: {' and '.join(rest)}: left out, {why}")

    @property
    def device(self) -> torch.device:
        """Where trials run."""
        return resolve_device(self.trainer.device)

    @property
    def record(self) -> StudyRecord:
        """What was trained so far, read from disk: the trials that this session has asked for.

        Trials that an interrupted call left further on stay unseen until they are asked for, so that a study that decides
        from its record goes on exactly as it would have without the interruption.
        """
        return StudyRecord(self.writer.record.path, frozenset(self._seen))

    @property
    def run_s(self) -> float | None:
        """Seconds that the baseline took, or would have taken to its end where it diverged before; None before it was run."""
        trials = self.record.trials
        own = trials[trials["stage"] == Role.BASELINE] if len(trials) else trials
        if not len(own):
            return None
        seconds, steps = own[["seconds", "steps_run"]].iloc[0]
        return float(seconds) * self.config.total_steps / max(float(steps), 1.0)

    def within_budget(self, configs: Sequence[TrainConfig]) -> list[TrainConfig]:
        """Return the first of these trials that the budget pays for, and all that this session has run."""
        if not self.budget.text:
            return list(configs)
        timed = self.budget.seconds < math.inf  # what is on disk takes no time, but it was paid for
        new = [c for c in configs if c not in self._asked and not (timed and self.writer.has(c.to_dict()))]
        spent = int(self.record.trials["steps_run"].sum()) if self._seen else 0
        paid = self.budget.affordable(new, run=self.config.total_steps, spent=spent, run_s=self.run_s)
        if paid < len(new):
            self.budget.ended = self.budget.ended or self._at
        return [config for config in configs if config not in new[paid:]]

    def pays(self, configs: Sequence[TrainConfig]) -> bool:
        """Tell whether the budget pays for all of these trials, before they are asked for."""
        before = self.budget.ended, self.budget.reserved
        paid = len(self.within_budget(configs)) == len(configs)
        self.budget.ended, self.budget.reserved = before
        return paid

    def plan_proof(self, seeds: int, *, fixes: bool) -> None:
        """Store what is to be trained within the budget: what is missing in the end is no sign then.

        Args:
            seeds: of a proof; a candidate that was not trained under them is not adopted.
            fixes: whether a best lr at the edge is to be tried with a warmup or clipping.
        """
        before = self.record.facts.get("proof_seeds", 1)
        self.facts(budget_given=self.budget.text or "none", proof_seeds=max(seeds, before), fixes_planned=fixes)

    def keep_budget(self) -> None:
        """Store what the budget did not pay for, for the record to say why it ends where it does."""
        told = self.budget.told()
        if told or self.record.facts.get("budget"):
            self.facts(budget=told)

    def check(self, configs: Sequence[TrainConfig]) -> dict[str, int]:
        """Return the number of examples of each split; `ConfigError` for a config that cannot be trained."""
        return check_lanes(self.workload, configs)

    def trial(self, config: TrainConfig, *, stage: str) -> TrialRecord:
        """Run one trial, or return it from the folder where it is complete already."""
        return self.trials([config], stage=stage)[0]

    def trials(
        self, configs: Sequence[TrainConfig], *, stage: str, trainer: AnyTrainer | None = None
    ) -> list[TrialRecord]:
        """Run trials that do not depend on each other, and return their records in the order of `configs`."""
        if not configs:
            return []
        lrs = [config.peak_lr for config in configs if not self.writer.has(config.to_dict())] or [configs[0].peak_lr]
        span = f"{min(lrs):.3g}" if len(set(lrs)) == 1 else f"{min(lrs):.3g} to {max(lrs):.3g}"
        new = set(configs) - self._asked
        there = sum(self.writer.updates_of(config.to_dict()) for config in new)
        self._bar.skip(there)
        if not self._planned:  # the study decides as it goes: the end that is known is that of these trials
            self._bar.expect(self._bar.done - there + sum(config.total_steps for config in new))
        self._expect()
        if new:
            self._bar.status(self._stage or STAGES.get(stage, stage), f", lr {span}")
        trainer = trainer or self.trainer
        how: dict[str, Any] = {"stage": stage, "progress": self._bar.advance}
        if self.executor is None:
            records = trainer.run_trials(self.workload, configs, self.writer, **how)
        else:
            records = self.executor.run(self.workload, configs, self.writer, trainer=trainer, **how)
        self._seen |= {record.number for record in records}
        self._asked |= set(configs)
        return records

    def facts(self, **values: Any) -> None:
        """Store what was measured on the live model."""
        self.writer.add_facts(**values)

    def collect(self, name: str, look: Callable[[], Any], *, anew: bool = False) -> None:
        """Store what `look` returns as the facts `name`, unless they are there and are not to be had `anew`; where it raises, store the reason for `why_missing`.

        What goes wrong in a look at the model ends no study: training it is another matter.

        Raises:
            RecordError: the folder cannot be used.
        """
        known = self.record.facts
        if name in known and not anew:
            return
        try:
            self.facts(**{name: look()})
        except (RecordError, ClusterError, BudgetSpent):
            raise
        except Exception as error:
            self.facts(**{name: None, NOT_COLLECTED: {**known.get(NOT_COLLECTED, {}), name: in_one_line(error)}})


def executor_of(name: str, address: str | None = None) -> RayExecutor | None:
    """Return the executor of this name, None for "local"; nothing is started before its first trial.

    Raises:
        UsageError: there is no such executor, or the address belongs to another one.
        WorkbenchError: Ray is not installed.
    """
    if name not in EXECUTORS:
        raise UnknownNameError(f"executor={name!r} is not known.{nearest(name, EXECUTORS)}")
    if name == "ray":
        from workbench.studies.executors.on_ray import RayExecutor

        return RayExecutor(address)
    if address is not None:
        raise UsageError(
            f"address={address!r} names a Ray cluster, and executor={name!r} has no use for one. Add executor='ray' "
            "(--executor ray), or leave the address out."
        )
    return None


class RunOptions(TypedDict, total=False):
    """How a study is run, as `Study.run` takes it."""

    trainer: AnyTrainer | None
    executor: str
    address: str | None
    out: str | Path | None
    name: str | None
    note: str | None
    command: str | None  # what reproduces the study; None is this process's command line
    call: str | None  # the Python expression that ran it; the command where there is no command line, as in a notebook
    progress: bool
    budget: Budget | None  # what it may cost; None is without a limit


@contextmanager
def open_session(
    workload: Workload,
    *,
    stem: str,
    settings: Mapping[str, Any],
    steps: int | None = None,
    **options: Unpack[RunOptions],
) -> Iterator[Session]:
    """Open a study's folder for `workload`, checked before anything is written, and close it afterwards."""
    check_alone("a study")
    runner = executor_of(options.get("executor", "local"), options.get("address"))
    check_workload(workload)
    trainer = options.get("trainer") or Trainer()
    device = resolve_device(trainer.device)
    config = at_length(workload.config, steps)
    check_data(workload, config)
    check_selection(workload, config)
    found = _fingerprint(workload, config, device)
    out = options.get("out")
    writer = StudyWriter.open(
        None if out is None else Path(out),
        kind=stem,
        workload=workload.name,
        config=config.to_dict(),
        settings=dict(settings),
        name=options.get("name"),
        note=options.get("note"),
        command=options.get("command"),
        call=options.get("call"),
    )
    try:
        if not workload.minimised:
            writer.add_facts(minimised=False)
        if found is not None:
            writer.hold_against(found)
        asked = trainer.threads if isinstance(trainer, Trainer) else None
        threads = step_threads(workload, config, device, asked, study=writer)
        show = options.get("progress", False)
        say_resumed(writer, show=show)
        shown = progress_bar(None, workload.name, show=show)
        with interruptible(writer.path), runner or nullcontext(), threads, shown as bar:
            budget = options.get("budget")
            yield Session(workload, config, trainer=trainer, executor=runner, writer=writer, bar=bar, budget=budget)
        writer.finish()
    except Exception:
        writer.discard_unused()
        raise
    finally:
        writer.close()


def say_resumed(writer: StudyWriter, *, show: bool) -> None:
    """Say that an unfinished study is gone on with, and what of it is there."""
    if show and not writer.created and "finished" not in writer.record.study:
        trials = writer.record.trials
        states = [str(state) for state in trials.get("state", ())]
        done = sum(state in ("complete", "diverged") for state in states)
        kept = f", {int(trials['steps_run'].sum()):,} steps are kept" if states else ""
        print(f"Resumes {writer.path}: {done} of {len(states)} trials are trained to their end{kept}.", file=sys.stderr)


def _fingerprint(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, Any] | None:
    """Return the workload's fingerprint; None where its code raises, which the first look at it explains better."""
    try:
        return fingerprint(workload, config, device)
    except TargetError:  # the pre-flight makes a finding of it
        return None
    except WorkbenchError:
        raise
    except Exception:
        return None


def at_length(config: TrainConfig, steps: int | None) -> TrainConfig:
    """Return `config` with `steps` updates; warmup and evaluation keep their share of the run."""
    if steps is None or steps == config.total_steps:
        return config
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps={steps!r} must be an integer of at least 1; leave it out for the workload's own.")
    share = steps / config.total_steps

    def scaled(value: int | None) -> int | None:
        return None if value is None else max(1, round(value * share))

    return config.replace(
        total_steps=steps,
        warmup_steps=min(round(config.warmup_steps * share), steps - 1),
        eval_every_steps=scaled(config.eval_every_steps),
        checkpoint_every_steps=scaled(config.checkpoint_every_steps),
    )
