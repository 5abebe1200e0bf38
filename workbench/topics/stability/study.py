"""`InstabilityStudy`: the runs that show whether training is unstable, and whether that costs anything."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from workbench.checks import check_fields, check_integer, check_number
from workbench.config import TrainConfig
from workbench.curves.judged import judged
from workbench.errors import ConfigError
from workbench.findings.diagnosis import Diagnosis
from workbench.record.roles import Role
from workbench.schedules import prepend_warmup
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.study import LRSweep, TrialRequest, run_round
from workbench.topics.stability.diagnose import diagnose_instability


@dataclass(frozen=True, kw_only=True)
class InstabilityStudy(Study):
    """Probe, confirmation runs and fix runs around the best learning rate.

    A short probe at twice lr*, evaluated at every step (F1.11); runs at 5 and 10 times lr* (F1.13); and, where lr* sits at the edge
    of the unstable region (F1.12), fix runs beyond it that say whether the edge is curable, because every workload has an lr that is
    too high (F1.4).

    Attributes:
        best_lr: lr*; None sweeps for it first.
        steps: length of a full trial; None is the baseline's.
        probe_steps: length of the probe, at most a full trial (F1.11).
        probe_multiple: the probe's lr over lr* (F1.11).
        confirm_multiples: lrs of the confirmation runs over lr* (F1.13).
        confirm_all: run every multiple; False stops at the first one that is unstable without recovery.
        fixes: what to try beyond an edge, to tell whether it is curable; () asks nothing.
        fix_multiple: lr of a fix run over the lr where instability starts (rule of thumb).
        fix_warmup_frac: its warmup as a share of the run, the cap of F3.10; prepended, so the run is longer by it (F3.11).
        fix_percentile: clipping threshold of the second fix run, a percentile of the norms at lr* (F4.9).
        sweep: how to sweep when `best_lr` is None.
    """

    stem: ClassVar[str] = "instability"

    best_lr: float | None = None
    steps: int | None = None
    probe_steps: int = 500
    probe_multiple: float = 2.0
    confirm_multiples: Sequence[float] = (5.0, 10.0)
    confirm_all: bool = True
    fixes: Sequence[Literal["warmup", "clipping"]] = ("warmup", "clipping")
    fix_multiple: float = 1.5
    fix_warmup_frac: float = 0.1
    fix_percentile: float = 90.0
    sweep: LRSweep = field(default_factory=LRSweep)

    def __post_init__(self) -> None:
        """Check every field."""
        numbers = {name: getattr(self, name) for name in ("probe_multiple", "fix_multiple", "best_lr")}
        numbers |= {f"confirm_multiples[{i}]": m for i, m in enumerate(self.confirm_multiples)}
        for name, value in numbers.items():
            if value is not None or name != "best_lr":
                check_number(name, value)
        check_fields(self, "fix_warmup_frac", lambda v: 0 < v <= 1, "above 0 and at most 1")
        check_fields(self, "fix_percentile", lambda v: 0 < v <= 100, "above 0 and at most 100")
        for kind in self.fixes:
            if kind not in ("warmup", "clipping"):
                raise ConfigError(f"fixes={tuple(self.fixes)!r} may hold 'warmup' and 'clipping', not {kind!r}.")
        check_integer("probe_steps", self.probe_steps)

    def extend(self, session: Session) -> None:
        """Run the study's trials inside a study that is already open."""
        lr_star = self._lr_star(session)
        if lr_star is None:
            return
        session.facts(lr_star=lr_star)
        config = session.config
        star = TrialRequest(Role.LR_SWEEP, config.replace(peak_lr=lr_star))
        steps = min(self.probe_steps, config.total_steps)
        probed = config.replace(
            peak_lr=self.probe_multiple * lr_star, total_steps=steps, warmup_steps=0, schedule="constant", eval_every_steps=1,
            checkpoint_every_steps=steps,
        )  # fmt: skip
        confirm = [TrialRequest(Role.CONFIRM, config.replace(peak_lr=lr)) for lr in self._confirm_lrs(session, lr_star)]
        known = diagnose_lr_sweep(session.record)
        edge = known["lr.unstable"].evidence.get("upper")
        # Confirmation runs beyond the edge tell nothing new about where it is, so a fix need not wait for them.
        settled = edge is not None and all(trial.config.peak_lr >= edge for trial in confirm)
        if settled:
            run_round(session, [star])  # a fix may need its gradient norms
        fixes = self._fixes(session, lr_star, known) if settled else []
        stable = [trial for trial in confirm if edge is not None and trial.config.peak_lr < edge]
        at_once = len(confirm) if self.confirm_all else min(len(stable) + 1, len(confirm))
        # where a budget ends, a fix tells more than a run beyond the edge
        first = [star, TrialRequest(Role.PROBE, probed), *fixes[:1]]
        done = run_round(session, [*first, *confirm[:at_once]])
        numbers = {trial.number for trial in done[len(first) :]}
        for further in confirm[at_once:]:
            rows = diagnose_instability(session.record)["stability.divergent"].evidence["trials"]
            if any(row["trial"] in numbers and row["outcome"] in ("lasting", "divergent") for row in rows):
                break
            numbers |= {trial.number for trial in run_round(session, [further])}
        fixes = fixes if settled else self._fixes(session, lr_star, diagnose_lr_sweep(session.record))
        for fix in fixes[settled:]:
            if diagnose_lr_sweep(session.record)["lr.at_edge"].evidence.get("harmful") is True:
                return
            run_round(session, [fix])

    def extra_trials(self, config: TrainConfig, lr: float) -> list[TrialRequest]:
        """Return what to train beside the first full-length trials of the sweep, on the bet that lr* is about `lr`.

        Without `confirm_all` one confirmation run is all that is needed, and as a lane of a larger stack it hardly costs anything.
        """
        if self.confirm_all or not self.confirm_multiples:
            return []
        return [TrialRequest(Role.CONFIRM, config.replace(peak_lr=min(self.confirm_multiples) * lr))]

    def conclude(self, session: Session) -> None:
        """Store what its sweep found."""
        self.sweep.conclude(session)

    def _confirm_lrs(self, session: Session, lr_star: float) -> list[float]:
        """Return the lrs of the confirmation runs; one that was trained before counts where it is a multiple asked for."""
        wanted = [m * lr_star for m in self.confirm_multiples]
        if not wanted or not len(trials := session.record.trials):
            return wanted
        before = trials["peak_lr"][trials["stage"] == Role.CONFIRM].tolist()
        fitting = [lr for lr in before if min(wanted) * (1 - 1e-9) <= lr <= max(wanted) * (1 + 1e-9)]
        return wanted if not fitting else [min(fitting), *(lr for lr in wanted if lr > min(fitting) * (1 + 1e-9))]

    def _lr_star(self, session: Session) -> float | None:
        if self.best_lr is not None:
            return self.best_lr
        found = diagnose_lr_sweep(session.record)["lr.best"].value
        if found is None:
            self.sweep.extend(session)
            found = diagnose_lr_sweep(session.record)["lr.best"].value
        return found

    def _fixes(self, session: Session, lr_star: float, known: Diagnosis) -> list[TrialRequest]:
        """Return what to try beyond an edge that lr* sits at, one fix after the other until one helps; else nothing."""
        onset, record = known["lr.unstable"].value, session.record
        if known["lr.at_edge"].status != "warn" or onset is None or session.config.total_steps < 10:
            return []
        config, found = session.config.replace(peak_lr=self.fix_multiple * onset), []
        for kind in self.fixes:
            if kind == "warmup":
                found.append(prepend_warmup(config, max(1, round(self.fix_warmup_frac * config.total_steps))))
                continue
            curve = next(c for c in judged(record).curves if math.isclose(c.lr, lr_star, rel_tol=1e-9))
            norms = curve.steps["grad_norm"].to_numpy(dtype=np.float64)
            norms = norms[np.isfinite(norms)]
            threshold = float(np.percentile(norms, self.fix_percentile)) if norms.size else 0.0
            found += [config.replace(max_grad_norm=threshold)] if threshold > 0 else []
        return [TrialRequest(Role.FIX, each) for each in found]
