"""`ModificationStudy`: a baseline, a modification of it, and the modification with a warmup, over the same learning rates (F1.3)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from workbench.checks import check_integer
from workbench.errors import ConfigError
from workbench.schedules import cap_steps, prepend_warmup
from workbench.studies.session import at_length
from workbench.topics.comparison.diagnose import Arms
from workbench.topics.lr_sweep.study import LRSweep
from workbench.topics.stability.study import InstabilityStudy
from workbench.train.trainer import AnyTrainer
from workbench.workloads.base import Workload

BASELINE, MODIFIED, WARMED = "baseline", "modified", "warmed"
LONGEST_WARMUP = 1000  # steps of the warmup of figure 4 (F3.16)


@dataclass(frozen=True, kw_only=True)
class ModificationStudy:
    """Sweeps of three arms: the baseline, the modified workload, and the modified one with a warmup in front.

    Each arm is a study of its own, in a folder of its own; the modified arm is an `InstabilityStudy`, so that it has a probe and runs
    at 5 and 10 times its best lr as well (F1.13).

    Attributes:
        lrs: learning rates of every arm; None is the baseline's own times 2**k, k from -4 to 6 (rule of thumb).
        seeds: trials per learning rate and arm; at least two, to know the spread.
        steps: length of a trial before the warmup; None is the baseline's.
        warmup_steps: of the third arm; None is the 1,000 of figure 4, or the cap where that is shorter (F3.10, F3.16).
        cap_frac: longest warmup as a share of the steps (F3.10).
        instability: probe and confirmation runs of the modified arm; its sweep is this study's.
    """

    stem: ClassVar[str] = "comparison"

    lrs: Sequence[float] | None = None
    seeds: int = 3
    steps: int | None = None
    warmup_steps: int | None = None
    cap_frac: float = 0.1
    instability: InstabilityStudy = field(default_factory=lambda: InstabilityStudy(fixes=()))

    def __post_init__(self) -> None:
        """Check every field; lrs and seeds are the sweep's to check."""
        LRSweep(lrs=self.lrs, seeds=self.seeds)
        if not 0 < self.cap_frac <= 1:
            raise ConfigError(f"cap_frac={self.cap_frac!r} must be above 0 and at most 1: 0.1 is a tenth of the steps.")
        if self.warmup_steps is not None:
            check_integer("warmup_steps", self.warmup_steps, hint="; None takes 1,000 or the cap")

    def run(
        self,
        baseline: Workload,
        modified: Workload,
        trainer: AnyTrainer | None = None,
        executor: str = "local",
        out: str | Path | None = None,
        **run: Any,
    ) -> Arms:
        """Run the three arms and return their records; the same call again goes on where it was.

        Args:
            modified: the same with the modification; its config is its own, but for the lr and the length.
            trainer: None is the local `Trainer`.
            executor: where trials run: "local" is this process, "ray" a cluster.
            out: the folder of the three folders "baseline", "modified" and "warmed"; None puts each of them under `runs/`.
            **run: what else `LRSweep.run` takes, such as `address`, `note` and `progress`.

        Raises:
            ConfigError: the steps are too few for a warmup.
            WorkloadError: model, data or loss of an arm are broken.
            RecordError: a folder cannot be used.
        """
        steps = self.steps or baseline.config.total_steps
        lrs = [baseline.config.peak_lr * 2.0**k for k in range(-4, 7)] if self.lrs is None else self.lrs
        sweep = LRSweep(lrs=lrs, seeds=self.seeds, steps=steps)
        warmed = self._with_warmup(modified, steps)
        run |= {"trainer": trainer, "executor": executor}
        where = {name: None if out is None else Path(out) / name for name in (BASELINE, MODIFIED, WARMED)}
        signs = replace(self.instability, steps=steps, sweep=sweep)
        return Arms(
            baseline=sweep.run(baseline, out=where[BASELINE], **run),
            modified=signs.run(modified, out=where[MODIFIED], **run),
            warmed=replace(sweep, steps=None).run(warmed, out=where[WARMED], **run),
        )

    def _with_warmup(self, workload: Workload, steps: int) -> Workload:
        cap = cap_steps(steps, self.cap_frac)
        warmup = min(LONGEST_WARMUP, cap) if self.warmup_steps is None else self.warmup_steps
        if warmup < 1:
            raise ConfigError(
                f"steps={steps} leaves no warmup below the cap of {self.cap_frac:g}: give warmup_steps, or more steps."
            )
        return workload.replace(config=prepend_warmup(at_length(workload.config, steps), warmup))
