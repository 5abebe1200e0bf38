"""One round of a study: trials that do not depend on each other, asked for together so that they train side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.config import TrainConfig
from workbench.record.read import TrialRecord
from workbench.record.roles import Role
from workbench.studies.session import Session
from workbench.topics.lr_sweep.chance_level import measure_chance
from workbench.train.lane_groups import check_lanes

__all__ = ["Asked", "run_round"]


class Asked(NamedTuple):
    """A trial that a round asks for, and what for."""

    stage: Role
    config: TrainConfig


def run_round(session: Session, asked: Sequence[Asked]) -> list[TrialRecord]:
    """Run the trials of one round and return their records in the order asked; the same trial twice is one.

    Args:
        session: the study.
        asked: its trials; they may be of different stages and lengths.

    Raises:
        WorkbenchError: one cannot be trained; it is named, and nothing is written.
    """
    unique: dict[TrainConfig, str] = {}
    for trial in asked:
        unique.setdefault(trial.config, trial.stage)
    if not unique:
        return []
    session.collect("chance_loss", lambda: measure_chance(session.workload, session.config, session.device))
    sizes = check_lanes(session.workload, list(unique))
    mixed = len(set(unique.values())) > 1
    for config, stage in unique.items() if mixed else ():  # a trial keeps the stage that it was first written down with
        session.writer.trial(config.to_dict(), stage=stage, train_examples=sizes["train"])
    records = session.trials(list(unique), stage=next(iter(unique.values())))
    done = dict(zip(unique, records, strict=True))
    return [done[trial.config] for trial in asked]
