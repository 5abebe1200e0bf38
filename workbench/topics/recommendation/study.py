"""The proof that a candidate is better: both arms over the same seeds, side by side (P4.7, F3.12)."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.checks import check_integer
from workbench.config import TrainConfig
from workbench.curves.seed_comparison import prove, worth_more_seeds
from workbench.record.roles import Role
from workbench.studies.session import Session
from workbench.topics.lr_sweep.study import TrialRequest, run_round, seeded


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Trains baseline and candidate with the same fresh seeds; what was trained before is not trained again.

    Attributes:
        seeds: for each arm, behind the baseline's own, under which the candidate was chosen. A candidate that lengthens the
            run is held against a third arm, the baseline at its length.
        more_seeds: trained behind them where the candidate gained in the mean and the spread still leaves it to chance.
    """

    seeds: int = 3
    more_seeds: int = 2

    def __post_init__(self) -> None:
        """Check the number of seeds."""
        check_integer("seeds", self.seeds, hint="; with 1 nothing is proved")
        check_integer("more_seeds", self.more_seeds, low=0, hint="; 0 never trains more")

    def baselines(self, config: TrainConfig) -> list[TrialRequest]:
        """Return the baseline under each fresh seed: whether they agree says how much a single run can tell."""
        return [TrialRequest(Role.BASELINE, each) for each in _fresh(config, self.seeds)]

    def extend(self, session: Session, candidate: TrainConfig) -> None:
        """Run the arms inside a study that is already open, the candidate under the baseline's seeds."""
        if self.seeds < 2:
            return
        arms = [session.config, candidate]
        if candidate.total_steps > session.config.total_steps:
            arms.append(session.config.replace(total_steps=candidate.total_steps))
        _train(session, arms, self.seeds)
        first = prove(session.record, baseline=session.config.to_dict(), candidate=candidate.to_dict())
        if worth_more_seeds(first):
            _train(session, arms, self.seeds + self.more_seeds)


def _train(session: Session, arms: list[TrainConfig], seeds: int) -> None:
    run_round(session, [TrialRequest(Role.PROOF, config) for arm in arms for config in _fresh(arm, seeds)])


def _fresh(config: TrainConfig, seeds: int) -> list[TrainConfig]:
    return seeded(config, config.peak_lr, seeds + 1)[1:] if seeds > 1 else []
