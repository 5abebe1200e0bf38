"""`InstabilityStudy`: the runs that show whether training is unstable, and whether that costs anything.

A short probe at twice the best lr, evaluated at every step (F1.11); runs at 5 and 10 times the best lr (F1.13); and,
where the best lr sits at the edge of the unstable region (F1.12), a fix run beyond it that says whether the edge is
curable, because every workload has an lr that is too high (F1.4).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from workbench.checks import check_integer, check_number
from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.findings.diagnosis import Diagnosis
from workbench.record.read import TrialRecord
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

    Attributes:
        best_lr: lr*; None sweeps for it first.
        steps: length of a full trial; None is the baseline's.
        probe_steps: length of the probe, at most a full trial (F1.11).
        probe_multiple: the probe's lr over lr* (F1.11).
        confirm_multiples: lrs of the confirmation runs over lr* (F1.13).
        confirm_all: run every multiple; False stops at the first one that is lastingly unstable.
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
        numbers = {"probe_multiple": self.probe_multiple, "fix_multiple": self.fix_multiple}
        numbers |= {f"confirm_multiples[{i}]": m for i, m in enumerate(self.confirm_multiples)}
        if self.best_lr is not None:
            numbers["best_lr"] = self.best_lr
        for name, value in numbers.items():
            check_number(name, value)
        shares = {"fix_warmup_frac": (self.fix_warmup_frac, 1.0), "fix_percentile": (self.fix_percentile, 100.0)}
        for name, (value, top) in shares.items():
            if not 0 < value <= top:
                raise ConfigError(f"{name}={value!r} must be above 0 and at most {top:g}.")
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
        star = TrialRequest(Role.LR_SWEEP, session.config.replace(peak_lr=lr_star))
        probe = TrialRequest(Role.PROBE, self._probe(session.config, lr_star))
        lrs = self._confirm_lrs(session, lr_star)
        confirm = [TrialRequest(Role.CONFIRM, session.config.replace(peak_lr=lr)) for lr in lrs]
        known = diagnose_lr_sweep(session.record)
        edge = known["lr.unstable"].evidence.get("upper")
        # Confirmation runs beyond the edge tell nothing new about where it is, so a fix need not wait for them.
        settled = edge is not None and all(trial.config.peak_lr >= edge for trial in confirm)
        if settled:
            run_round(session, [star])  # a fix may need its gradient norms
        fixes = self._fixes(session, lr_star, known) if settled else []
        at_once = len(confirm) if self.confirm_all else _first_beyond(confirm, edge)
        _, _, *done = run_round(session, [star, probe, *confirm[:at_once], *fixes[:1]])
        self._confirm_further(session, confirm, done[:at_once])
        fixes = fixes if settled else self._fixes(session, lr_star, diagnose_lr_sweep(session.record))
        for fix in fixes[settled:]:
            if diagnose_lr_sweep(session.record)["lr.at_edge"].evidence.get("harmful") is True:
                return
            run_round(session, [fix])

    def extra_trials(self, config: TrainConfig, lr: float) -> list[TrialRequest]:
        """Return what to train beside the first full-length trials of the sweep, on the bet that lr* is about `lr`.

        A confirmation run at the smallest multiple of it is one at a multiple of lr* too, where lr* is not far below.
        Without `confirm_all` it is the only one needed, and as a lane of a larger stack it hardly costs anything.
        """
        if self.confirm_all or not self.confirm_multiples:
            return []
        return [TrialRequest(Role.CONFIRM, config.replace(peak_lr=min(self.confirm_multiples) * lr))]

    def _confirm_lrs(self, session: Session, lr_star: float) -> list[float]:
        """Return the lrs of the confirmation runs; one that was trained before counts where it is a multiple asked for."""
        wanted = [m * lr_star for m in self.confirm_multiples]
        if not wanted or not len(trials := session.record.trials):
            return wanted
        before = trials["peak_lr"][trials["stage"] == Role.CONFIRM].tolist()
        fitting = [lr for lr in before if min(wanted) * (1 - 1e-9) <= lr <= max(wanted) * (1 + 1e-9)]
        return wanted if not fitting else [min(fitting), *(lr for lr in wanted if lr > min(fitting) * (1 + 1e-9))]

    def _confirm_further(self, session: Session, confirm: Sequence[TrialRequest], done: Sequence[TrialRecord]) -> None:
        """Run the confirmation runs that are left, until one is lastingly unstable."""
        numbers = {trial.number for trial in done}
        for further in confirm[len(done) :]:
            if _lasting(session, numbers):
                return
            numbers |= {trial.number for trial in run_round(session, [further])}

    def _lr_star(self, session: Session) -> float | None:
        if self.best_lr is not None:
            return self.best_lr
        found = diagnose_lr_sweep(session.record)["lr.best"].value
        if found is None:
            self.sweep.extend(session)
            found = diagnose_lr_sweep(session.record)["lr.best"].value
        return found

    def _probe(self, config: TrainConfig, lr_star: float) -> TrainConfig:
        steps = min(self.probe_steps, config.total_steps)
        return config.replace(
            peak_lr=self.probe_multiple * lr_star, total_steps=steps, warmup_steps=0, schedule="constant", eval_every_steps=1,
            checkpoint_every_steps=steps,
        )  # fmt: skip

    def _fixes(self, session: Session, lr_star: float, known: Diagnosis) -> list[TrialRequest]:
        """Return what to try beyond an edge that lr* sits at, one fix after the other until one helps; else nothing."""
        onset = known["lr.unstable"].value
        if known["lr.at_edge"].status != "warn" or onset is None or session.config.total_steps < 10:
            return []
        config = session.config.replace(peak_lr=self.fix_multiple * onset)
        fixed = [self._fixed(session, config, kind, lr_star) for kind in self.fixes]
        return [TrialRequest(Role.FIX, config) for config in fixed if config is not None]

    def _fixed(self, session: Session, config: TrainConfig, kind: str, lr_star: float) -> TrainConfig | None:
        if kind == "warmup":
            steps = max(1, round(self.fix_warmup_frac * config.total_steps))
            return prepend_warmup(config, steps)
        record = session.record
        at_best = record.trials["peak_lr"].sub(lr_star).abs() <= 1e-9 * lr_star
        rows = record.steps["trial"] == record.trials["trial"][at_best].iloc[0]
        norms = record.steps["grad_norm"][rows].to_numpy(dtype=np.float64)
        norms = norms[np.isfinite(norms)]
        threshold = float(np.percentile(norms, self.fix_percentile)) if norms.size else 0.0
        return config.replace(max_grad_norm=threshold) if threshold > 0 else None


def _first_beyond(confirm: Sequence[TrialRequest], edge: float | None) -> int:
    """Return how many confirmation runs are needed in any case: those up to the first one beyond the edge."""
    stable = [trial for trial in confirm if edge is not None and trial.config.peak_lr < edge]
    return min(len(stable) + 1, len(confirm))


def _lasting(session: Session, numbers: Collection[int]) -> bool:
    rows = diagnose_instability(session.record)["stability.divergent"].evidence["trials"]
    return any(row["trial"] in numbers and row["outcome"] in ("lasting", "divergent") for row in rows)
