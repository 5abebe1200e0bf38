"""`ClippingStudy`: does clipping the gradient norm let an unstable lr train, at which threshold, and at what price?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from workbench.checks import check_fields, check_integer, check_number
from workbench.curves.clipping import ReferenceNorms, clipped_runs, reference_norms
from workbench.curves.judged import judged_runs
from workbench.errors import ConfigError
from workbench.record.roles import Role
from workbench.studies.base import Study
from workbench.studies.session import Session
from workbench.topics.clipping.ladder import is_calm, read_ladder
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.study import TrialRequest, run_round, seeded

STAGE, CONTROL = Role.CLIPPING, Role.CLIPPING_CONTROL


@dataclass(frozen=True, kw_only=True)
class ClippingStudy(Study):
    """A ladder of clipping thresholds at one learning rate, and the same without clipping (F4.9, F4.10).

    Attributes:
        peak_lr: the lr that clipping is to make trainable; None takes `multiple` times the lr where instability starts,
            which a sweep in the same folder has found, and without one the baseline's.
        reference_lr: a stable lr whose norms the thresholds come from; None is the baseline's, below the unstable one.
        percentiles: of those norms, the loosest first (F4.9, F4.10).
        looser: the first percentile over all steps, those at the start included, is tried before where it is larger by
            this factor (rule of thumb).
        halvings: where no percentile cures, the last threshold is halved so many times.
        at_once: train the whole ladder in one round; False goes on to the next percentile only while instability stays.
        seeds: trials per threshold; the same seeds, and so the same batches, at each.
        multiple: see `peak_lr` (rule of thumb).
        lower, tries: an unstable reference is tried again at the lr divided by this, so many lrs at most (rules of thumb).
        steps: length of a trial; None is the baseline's.
    """

    stem: ClassVar[str] = "clipping"

    peak_lr: float | None = None
    reference_lr: float | None = None
    percentiles: Sequence[float] = (90.0, 75.0, 50.0, 25.0, 10.0)
    looser: float = 1.25
    halvings: int = 3
    at_once: bool = True
    seeds: int = 1
    multiple: float = 1.5
    lower: float = 4.0
    tries: int = 3
    steps: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("peak_lr", "reference_lr", "multiple"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        for name, low in (("seeds", 1), ("tries", 1), ("halvings", 0)):
            check_integer(name, getattr(self, name), low=low)
        check_fields(self, "lower looser", lambda v: 1 < v < math.inf, "a finite number above 1")
        ladder = list(self.percentiles)
        if not ladder or not all(isinstance(p, (int, float)) and 0 < p <= 100 for p in ladder):
            raise ConfigError(f"percentiles={ladder!r} must hold at least one number, each above 0 and at most 100.")
        if any(a <= b for a, b in pairwise(ladder)):
            raise ConfigError(f"percentiles={ladder!r} must decrease: clipping begins loose and gets tighter (F4.10).")

    def extend(self, session: Session) -> None:
        """Run the study's trials inside a study that is already open."""
        edge = diagnose_lr_sweep(session.record)["lr.unstable"].value if len(session.record.trials) else None
        own = session.config
        lr = self.peak_lr if self.peak_lr is not None else own.peak_lr if edge is None else self.multiple * edge
        session.facts(clipping_lr=float(lr))
        config = own.replace(peak_lr=float(lr))

        def at(threshold: float | None, stage: Role = STAGE) -> list[TrialRequest]:
            each = config.replace(max_grad_norm=threshold)
            return [TrialRequest(stage, one) for one in seeded(each, each.peak_lr, self.seeds)]

        controls = at(None, Role.LR_SWEEP if edge is None else CONTROL)  # a sweep that has found its edge keeps it
        baseline = [TrialRequest(Role.BASELINE, own)] if own.max_grad_norm is not None else []
        reference = self._reference(session, edge, [*controls, *baseline])
        if reference is None:
            return
        thresholds = self._thresholds(reference)
        session.facts(clipping_thresholds=[list(found) for found in thresholds])
        ladder = [at(threshold) for _, threshold, _ in thresholds]
        calm = self._calm(session, controls)
        if self.at_once and not calm:
            run_round(session, [request for each in ladder for request in each])
            ladder = []
        for each in ladder:  # where nothing is unstable the first one shows how much is clipped, and suffices
            run_round(session, each)
            if calm or self._cured(session):
                return
        if thresholds and not self._cured(session):
            halved = [at(thresholds[-1][1] * 0.5 ** (k + 1)) for k in range(self.halvings)]
            run_round(session, [request for each in halved for request in each])

    def _cured(self, session: Session) -> bool:
        """Tell whether a threshold makes training stable without being a smaller lr in disguise."""
        record = session.record
        return any(one.cures() for one in read_ladder(record, clipped_runs(record)))

    def _thresholds(self, reference: ReferenceNorms) -> list[tuple[float, float, str]]:
        """Return (percentile, threshold, of which steps) of each candidate, loosest first.

        Where norms shrink as training goes on, the first percentile over all steps lies above that of the steady stretch,
        and comes first: the ladder goes down only, so it had better begin loose.
        """
        chosen = [reference.threshold(p) for p in self.percentiles]
        found = [(c.percentile, c.threshold, "steady") for c in chosen if c.threshold is not None]
        if found and chosen[0].all_steps is not None and chosen[0].all_steps >= self.looser * found[0][1]:
            found.insert(0, (chosen[0].percentile, chosen[0].all_steps, "all"))
        return found

    def _reference(
        self, session: Session, edge: float | None, extra_trials: Sequence[TrialRequest]
    ) -> ReferenceNorms | None:
        """Run the trial that the norms come from, the first one together with `extra_trials`; lower where unstable."""
        lr = self.reference_lr or session.config.peak_lr
        if self.reference_lr is None and edge is not None and lr >= edge:
            lr = edge / 2.0
        for _ in range(self.tries):
            config = session.config.replace(peak_lr=lr, max_grad_norm=None)
            session.facts(clipping_reference_lr=lr)
            (trial, *_) = run_round(session, [TrialRequest(Role.LR_SWEEP, config), *extra_trials])
            rows = judged_runs(session.record, set(session.record.trials["stage"]))
            if not any(row["trial"] == trial.number and row["lasting"] for row in rows):
                break
            lr, extra_trials = lr / self.lower, ()
        return reference_norms(session.record)

    def _calm(self, session: Session, controls: Sequence[TrialRequest]) -> bool:
        """Tell whether training shows no rise without clipping."""
        numbers = {trial.number for trial in run_round(session, controls)}  # trained already: this looks them up
        record = session.record
        rows = judged_runs(record, set(record.trials["stage"]))
        return all(is_calm(row) for row in rows if row["trial"] in numbers)
