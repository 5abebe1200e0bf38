"""What limits asynchronous training on parameter servers?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.topics.parameter_server.diagnose import diagnose_parameter_server as diagnose
from workbench.topics.parameter_server.diagnose import server_remedies as remedies
from workbench.topics.parameter_server.figures import plot_server_load as plot
from workbench.topics.parameter_server.figures import plot_staleness, plot_throughput
from workbench.topics.parameter_server.server_load import CODES, server_throughput

if TYPE_CHECKING:
    from workbench.parameter_server.cluster.cluster import connect_to_cluster, create_in_process_cluster, serve_task
    from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver, ClusterSpec, Task
    from workbench.parameter_server.context import get_current_worker_index
    from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator, merge_buffers
    from workbench.parameter_server.data.datasets import DatasetCreator, InputContext
    from workbench.parameter_server.data.string_lookup import StringLookup
    from workbench.parameter_server.errors import (
        CancelledError,
        ClosureInputError,
        GivenUpError,
        OutOfRangeError,
        UnavailableError,
    )
    from workbench.parameter_server.servers.layout import (
        FixedShardsPartitioner,
        MaxSizePartitioner,
        MinSizePartitioner,
    )
    from workbench.parameter_server.servers.row_rules import RowRule
    from workbench.parameter_server.servers.variable import ShardedVariable, Variable
    from workbench.parameter_server.strategy import ParameterServerStrategy as Strategy
    from workbench.parameter_server.strategy import compute_average_loss
    from workbench.parameter_server.training.callbacks import BackupAndRestore, Callback, ModelCheckpoint, TensorBoard
    from workbench.parameter_server.training.checkpoint_manager import CheckpointManager
    from workbench.parameter_server.training.evaluation import evaluate_direct, evaluate_distributed
    from workbench.parameter_server.training.sidecar import SidecarEvaluator
    from workbench.parameter_server.training.strategy_model import StrategyModel
    from workbench.parameter_server.training.trainer import ParameterServerTrainer as Trainer
    from workbench.parameter_server.workers.closure import RemoteValue
    from workbench.parameter_server.workers.worker import PerWorkerValues
    from workbench.topics.parameter_server.study import ParameterServerStudy as Study
    from workbench.topics.parameter_server.study import audit_parameter_server as audit
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = [
    "BackupAndRestore",
    "Callback",
    "CancelledError",
    "CheckpointManager",
    "ClosureInputError",
    "ClusterCoordinator",
    "ClusterResolver",
    "ClusterSpec",
    "DatasetCreator",
    "FixedShardsPartitioner",
    "GivenUpError",
    "InputContext",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ModelCheckpoint",
    "OutOfRangeError",
    "PerWorkerValues",
    "RemoteValue",
    "RowRule",
    "ShardedVariable",
    "SidecarEvaluator",
    "Strategy",
    "StrategyModel",
    "StringLookup",
    "Study",
    "Task",
    "TensorBoard",
    "Trainer",
    "UnavailableError",
    "Variable",
    "audit",
    "compute_average_loss",
    "connect_to_cluster",
    "create_in_process_cluster",
    "diagnose",
    "evaluate_direct",
    "evaluate_distributed",
    "get_current_worker_index",
    "merge_buffers",
    "plot",
    "plot_staleness",
    "plot_throughput",
    "remedies",
    "serve_task",
    "server_throughput",
]

TOPIC = Topic(
    name="parameter_server",
    codes=CODES,
    figures=(
        Figure(
            name="server-load",
            shows="Kilobytes of a step that each parameter server sends and receives, by the variables that cause them.",
            caption="Bars that end at the dashed line are healthy; one far beyond it decides how fast all are, and its longest part is the "
            "variable to split.",
            codes=("ps.imbalance", "ps.hotspot"),
            draw=plot,
            facts="parameter_server",
        ),
        Figure(
            name="staleness",
            shows="Updates of others between reading the parameters and applying the gradient.",
            caption="Most of the mass up to the number of other workers is healthy; a tail beyond the dotted line comes from a worker that is "
            "slower than the others.",
            codes=("ps.staleness",),
            draw=plot_staleness,
            facts="parameter_server",
        ),
        Figure(
            name="throughput",
            shows="Updates per second against the number of workers.",
            caption="Points near the dotted line are healthy; where a line turns flat, more workers bring nothing.",
            codes=("ps.bound",),
            draw=lambda record, _, *, ax: plot_throughput(record, ax=ax),
            facts="parameter_server_runs",
        ),
    ),
    studies={
        "parameter_server": StudyKind(diagnose=diagnose, pictures=("server-load",)),
    },
)
