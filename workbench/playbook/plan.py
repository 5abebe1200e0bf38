"""`plan_diagnosis`: what a diagnosis will train, what each part tells, and its price, before anything is trained."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.config import TrainConfig
from workbench.errors import TargetError, WorkbenchError
from workbench.studies.budget import Budget
from workbench.studies.session import at_length
from workbench.train.checkpoint import TRIAL_BYTES, WAITING_BYTES
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload

SEARCH_RUNS = 12.0
"""Baseline runs that learning rates and instability take, about: 7 where a run has 4,000 updates, 9 to 19 where it has a few hundred (measured)."""
PROGRAM_RUNS = 5.0
CLEAR_SEEDS = 2  # of a program's proof, which ends after so many where they are clear
"""Those that they take for a program, whose sweep begins at its own lr: what own scripts took (rule of thumb)."""
_TIMED = 16
"""Updates that are timed; the lower quartile of the later half counts: the first ones warm up, and other work only adds (rule of thumb)."""
_LATE = "overfitting, the best checkpoint, and whatever goes wrong later than the updates that are run"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a diagnosis.

    Attributes:
        name: what is run.
        runs: its price in baseline runs, at most where a budget holds, else about.
        tells: what it shows.
    """

    name: str
    runs: float
    tells: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a diagnosis will train.

    Attributes:
        name: of the workload.
        budget: as it was given, "" where there is no limit.
        paid: baseline runs that it pays for; `inf` where that is not known.
        steps: updates of a full-length run; 0 where only running shows it.
        whole: updates of the workload's own run; more than `steps` where the budget pays for the first look alone.
        run_s: seconds of a full-length run by itself, measured on a few updates and one evaluation; None where it was not.
        stages: in their order.
        unmeasured: what stays `not_measured`, "" for nothing.
        checkpoint_bytes: of one checkpoint; 0 where none was made.
        default: whether nobody gave the budget.
    """

    name: str
    budget: str
    steps: int
    whole: int
    run_s: float | None
    stages: Sequence[Stage]
    unmeasured: str
    default: bool = False
    paid: float = math.inf
    checkpoint_bytes: int = 0

    def __str__(self) -> str:
        """Return the plan as a table of lines."""
        least = "" if self.steps == self.whole else f" of {self.whole:,}: a first look"
        taken = "" if self.run_s is None else f", {_seconds(self.run_s)} by itself"
        length = (
            ": the first run shows how many updates it makes, and how long that takes"
            if not self.steps
            else f": runs of {self.steps:,} updates{least}{taken}"
        )
        lines = [
            f"Plan for {self.name}{length}",
            f"  runs{'     updates' * bool(self.steps)}{'    time' * (self.run_s is not None)}  what for",
        ]
        for number, stage in enumerate(self.stages, start=1):
            lines.append(f"{self._priced(stage.runs)}  {number}. {stage.name}: {stage.tells}")
        total = sum(stage.runs for stage in self.stages)
        limit = "about; there is no limit (--budget sets one)"
        if self.budget and total < self.paid - 1e-9:
            fits = not self.unmeasured and self.paid < math.inf
            limit = f"about; {'all parts fit in' if fits else 'at most'} the budget of {self.budget}"
        elif self.budget:
            limit = f"at most; the budget of {self.budget} is the limit"
        another = " (--budget sets another)" if self.default else ""
        lines.append(f"{self._priced(total)}  in all, {limit}{another}")
        if self.unmeasured:
            lines.append(f"Not measured: {self.unmeasured}.")
        if self.checkpoint_bytes > WAITING_BYTES:
            kept = f"up to {TRIAL_BYTES / 2**30:g} GiB, at least one of the best"
            lines.append(
                f"Checkpoints of {self.checkpoint_bytes / 2**30:.2g} GiB; each run keeps its latest and its best ones on disk, {kept}."
            )
        return "\n".join(lines)

    def _priced(self, runs: float) -> str:
        time = "" if self.run_s is None else f" {_seconds(runs * self.run_s):>7}"
        updates = "" if not self.steps else f"{round(runs * self.steps):>12,}"
        return f"{round(runs, 1):6g}{updates}{time}"


def plan_diagnosis(
    workload: Workload,
    *,
    budget: Budget,
    steps: int | None = None,
    proof_seeds: int = 3,
    trainer: Trainer | None = None,
    timed: bool = True,
    begun: int | None = None,
) -> Plan:
    """Return what `diagnose` with the same arguments will train.

    Args:
        workload: what is to be diagnosed.
        budget: what it may cost.
        steps: length of a full trial; None is the baseline's.
        proof_seeds: as for `diagnose`.
        trainer: what times it.
        begun: updates of the runs of a first look that is gone on with; None where none was begun.
        timed: measure what a run takes, by a few updates and one evaluation.

    Raises:
        WorkbenchError: those updates cannot be made, as where shapes do not fit.
    """
    whole = at_length(workload.config, steps)
    run_s, checkpoint_bytes = run_price(workload, whole, trainer or Trainer()) if timed else (None, 0)
    short = begun or budget.first_look(whole.total_steps, run_s)
    length = short or whole.total_steps
    run_s = None if run_s is None else run_s * length / whole.total_steps
    runs = budget.runs * whole.total_steps / length
    if budget.seconds < math.inf and run_s:
        runs = budget.seconds / run_s
    stages, missing = _stages(budget, runs, proof_seeds, [_LATE] if short else [], search=SEARCH_RUNS)
    stages.insert(0, Stage(name="before training", runs=0.0, tells="faults of data, model, loss and first updates"))
    return Plan(
        name=workload.name, budget=budget.text, steps=length, whole=whole.total_steps, run_s=run_s, stages=stages,
        unmeasured="; ".join(missing), default=budget.default, paid=runs, checkpoint_bytes=checkpoint_bytes,
    )  # fmt: skip


def plan_program(budget: Budget, *, seeds: int) -> Plan:
    """Return what the diagnosis of a program with the same arguments will run, in runs: only the first one shows their length."""
    budget.check_whole()
    late = [f"{_LATE}, where a run takes longer than a third of {budget.text}"] if budget.seconds < math.inf else []
    stages, missing = _stages(budget, budget.runs, seeds, late, search=PROGRAM_RUNS, clear=CLEAR_SEEDS)
    return Plan(name="the command", budget=budget.text, steps=0, whole=0, run_s=None, stages=stages, unmeasured="; ".join(missing), default=budget.default, paid=budget.runs)  # fmt: skip


def _stages(
    budget: Budget, runs: float, proof_seeds: int, missing: list[str], *, search: float, clear: float = math.inf
) -> tuple[list[Stage], list[str]]:
    """Return the parts that so many runs pay for, and what stays unmeasured."""
    seeds = Budget(budget.text, runs).seeds(proof_seeds)
    proof = 2.0 * seeds if seeds > 1 else 0.0
    search = max(min(search, runs - 1 - proof), 0.0)
    stages = [Stage(name="baseline", runs=1.0, tells="faults that show while it trains")]
    if search:
        stages.append(
            Stage(
                name="search",
                runs=search,
                tells="best and unstable learning rate; warmup and clipping where it starts badly",
            )
        )
    else:
        missing.append("other learning rates, and how far yours is from instability (from 2x on)")
    few, enough = (f"{clear} or ", f" ({clear} are enough where they are clear)") if clear < seeds else ("", "")
    if proof:
        stages.append(Stage(name=f"proof under {few}{seeds} fresh seeds", runs=proof, tells=f"whether a config that looks better is{enough}; left out where none does"))  # fmt: skip
    elif proof_seeds > 1:
        missing.append("a proof under fresh seeds (from 8x on)")
    return stages, missing


def run_price(workload: Workload, config: TrainConfig, trainer: Trainer) -> tuple[float | None, int]:
    """Return the seconds of one run of `config` and the bytes of a checkpoint, from a few updates and an evaluation.

    None where an error says nothing of its own, or targets are no classes: the diagnosis says more of that.
    """
    steps = min(_TIMED, config.total_steps)
    few = config.replace(total_steps=steps, warmup_steps=0, schedule="constant", eval_every_steps=steps, checkpoint_every_steps=steps)  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="workbench-plan-") as folder:
        try:
            record = trainer.run(workload.replace(config=few), out=Path(folder) / "s")
        except Exception as error:
            if isinstance(error, WorkbenchError) and not isinstance(error, TargetError):
                raise
            return None, 0
        update_s = float(record.steps["step_time_s"].iloc[steps // 2 :].quantile(0.25))
        evals = record.evals.drop_duplicates(["step", "split"])
        checkpoint_bytes = sum(path.stat().st_size for path in record.checkpoints[-1].iterdir())
        evaluation_s = float(evals["seconds"].sum()) / max(evals["step"].nunique(), 1)
    every = config.eval_interval
    if not math.isfinite(update_s + evaluation_s):
        return None, checkpoint_bytes
    return config.total_steps * update_s + (config.total_steps // every + 1) * evaluation_s, checkpoint_bytes


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
