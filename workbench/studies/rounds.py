"""One round of a study: trials that do not depend on each other, asked for together; those of one stage train as lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.config import TrainConfig
from workbench.record import TrialRecord
from workbench.studies.session import Session

__all__ = ["Asked", "run_round"]


class Asked(NamedTuple):
    """A trial that a round asks for, and what for."""

    stage: str
    config: TrainConfig


def run_round(session: Session, asked: Sequence[Asked]) -> list[TrialRecord]:
    """Run the trials of one round and return their records in the order asked; the same trial twice is one.

    Args:
        session: the study.
        asked: its trials.
    """
    unique: dict[TrainConfig, str] = {}
    for trial in asked:
        unique.setdefault(trial.config, trial.stage)
    done: dict[TrainConfig, TrialRecord] = {}
    for stage in dict.fromkeys(unique.values()):
        configs = [config for config, why in unique.items() if why == stage]
        done |= zip(configs, session.trials(configs, stage=stage), strict=True)
    return [done[trial.config] for trial in asked]
