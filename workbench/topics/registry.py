"""`TOPICS`: every question of which a report or a page shows something, in the order of a report."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.architecture.topic import TOPIC as architecture
from workbench.topics.batch_norm.topic import TOPIC as batch_norm
from workbench.topics.batch_size.topic import TOPIC as batch_size
from workbench.topics.checkpoints.topic import TOPIC as checkpoints
from workbench.topics.clipping.topic import TOPIC as clipping
from workbench.topics.evaluation.topic import TOPIC as evaluation
from workbench.topics.hosts.topic import TOPIC as hosts
from workbench.topics.input.topic import TOPIC as input
from workbench.topics.lr_sweep.topic import TOPIC as lr_sweep
from workbench.topics.optimizers.topic import TOPIC as optimizers
from workbench.topics.parameter_server.topic import TOPIC as parameter_server
from workbench.topics.recommendation.topic import TOPIC as recommendation
from workbench.topics.schedule.topic import TOPIC as schedule
from workbench.topics.stability.topic import TOPIC as stability
from workbench.topics.warmup.topic import TOPIC as warmup

TOPICS: tuple[Topic, ...] = (
    lr_sweep,
    stability,
    warmup,
    clipping,
    recommendation,
    schedule,
    optimizers,
    architecture,
    batch_size,
    evaluation,
    checkpoints,
    input,
    hosts,
    batch_norm,
    parameter_server,
)
FIGURES: tuple[Figure, ...] = tuple(figure for topic in TOPICS for figure in topic.figures)
STUDIES: dict[str, StudyKind] = {kind: study for topic in TOPICS for kind, study in topic.studies.items()}
"""Kind of a study -> what judges and shows it."""
