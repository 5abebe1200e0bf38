"""What limits asynchronous training on parameter servers?"""

from workbench.parameter_server.cluster.cluster import create_in_process_cluster as create_in_process_cluster
from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver as ClusterResolver
from workbench.parameter_server.cluster.connect import connect_to_cluster as connect_to_cluster
from workbench.parameter_server.cluster.serve_task import serve_task as serve_task
from workbench.parameter_server.context import get_current_worker_index as get_current_worker_index
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator as ClusterCoordinator
from workbench.parameter_server.coordinator.coordinator import merge_buffers as merge_buffers
from workbench.parameter_server.data.distributed_dataset import DatasetCreator as DatasetCreator
from workbench.parameter_server.data.distributed_dataset import InputContext as InputContext
from workbench.parameter_server.data.string_lookup import StringLookup as StringLookup
from workbench.parameter_server.data.visits import count_visits as count_visits
from workbench.parameter_server.fit.callbacks import BackupAndRestore as BackupAndRestore
from workbench.parameter_server.fit.callbacks import Callback as Callback
from workbench.parameter_server.fit.callbacks import ModelCheckpoint as ModelCheckpoint
from workbench.parameter_server.fit.callbacks import TensorBoard as TensorBoard
from workbench.parameter_server.fit.checkpoint_manager import CheckpointManager as CheckpointManager
from workbench.parameter_server.fit.evaluation import evaluate_direct as evaluate_direct
from workbench.parameter_server.fit.evaluation import evaluate_distributed as evaluate_distributed
from workbench.parameter_server.fit.sidecar import SidecarEvaluator as SidecarEvaluator
from workbench.parameter_server.fit.strategy_model import StrategyModel as StrategyModel
from workbench.parameter_server.servers.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
from workbench.parameter_server.servers.partitioners import MaxSizePartitioner as MaxSizePartitioner
from workbench.parameter_server.servers.partitioners import MinSizePartitioner as MinSizePartitioner
from workbench.parameter_server.servers.variable import ShardedVariable as ShardedVariable
from workbench.parameter_server.strategy import ParameterServerStrategy as Strategy
from workbench.parameter_server.trials.trainer import ParameterServerTrainer as Trainer
from workbench.parameter_server.workers.closure import RemoteValue as RemoteValue
from workbench.parameter_server.workers.resources import PerWorkerValues as PerWorkerValues
from workbench.topics.parameter_server.diagnose import diagnose_parameter_server as diagnose
from workbench.topics.parameter_server.diagnose import server_remedies as remedies
from workbench.topics.parameter_server.figures import plot_server_load as plot
from workbench.topics.parameter_server.figures import plot_staleness as plot_staleness
from workbench.topics.parameter_server.figures import plot_throughput as plot_throughput
from workbench.topics.parameter_server.panel import parameter_server_panel as panel
from workbench.topics.parameter_server.server_load import server_throughput as server_throughput
from workbench.topics.parameter_server.study import ParameterServerStudy as Study
from workbench.topics.parameter_server.study import audit_parameter_server as audit

__all__ = [
    "BackupAndRestore",
    "Callback",
    "CheckpointManager",
    "ClusterCoordinator",
    "ClusterResolver",
    "DatasetCreator",
    "FixedShardsPartitioner",
    "InputContext",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ModelCheckpoint",
    "PerWorkerValues",
    "RemoteValue",
    "ShardedVariable",
    "SidecarEvaluator",
    "Strategy",
    "StrategyModel",
    "StringLookup",
    "Study",
    "TensorBoard",
    "Trainer",
    "audit",
    "connect_to_cluster",
    "count_visits",
    "create_in_process_cluster",
    "diagnose",
    "evaluate_direct",
    "evaluate_distributed",
    "get_current_worker_index",
    "merge_buffers",
    "panel",
    "plot",
    "plot_staleness",
    "plot_throughput",
    "remedies",
    "serve_task",
    "server_throughput",
]
