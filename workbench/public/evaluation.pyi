"""Does evaluation measure what it should, often and precisely enough?"""

from workbench.topics.evaluation.check import check_evaluation as check
from workbench.topics.evaluation.diagnose import diagnose_evaluation as diagnose
from workbench.topics.evaluation.diagnose_sample import diagnose_evaluation_sample as diagnose_sample
from workbench.topics.evaluation.figures import plot_class_recall as plot_class_recall
from workbench.topics.evaluation.figures import plot_evaluation as plot
from workbench.topics.evaluation.figures import plot_evaluation_sample as plot_sample
from workbench.topics.evaluation.figures import plot_selection_gap as plot_selection_gap
from workbench.topics.evaluation.figures import plot_timed_evaluations as plot_timed
from workbench.topics.evaluation.sample_size import detectable_difference as detectable_difference
from workbench.topics.evaluation.sample_size import evaluation_sizes as sizes
from workbench.topics.evaluation.sample_size import examples_needed as examples_needed
from workbench.topics.evaluation.sample_size import selection_gaps as selection_gaps
from workbench.topics.evaluation.skew import skew_tests as skew_tests
from workbench.topics.evaluation.study import EvaluationSampleStudy as SampleStudy
from workbench.topics.evaluation.study import EvaluationStudy as Study
from workbench.train.evaluation import evaluate as evaluate
from workbench.train.offline import evaluate_offline as evaluate_offline
from workbench.train.offline import serve_requests as serve_requests
from workbench.workloads.subsets import periodic_subset as periodic_subset
from workbench.workloads.subsets import sampled_workload as sampled_workload

__all__ = [
    "SampleStudy",
    "Study",
    "check",
    "detectable_difference",
    "diagnose",
    "diagnose_sample",
    "evaluate",
    "evaluate_offline",
    "examples_needed",
    "periodic_subset",
    "plot",
    "plot_class_recall",
    "plot_sample",
    "plot_selection_gap",
    "plot_timed",
    "sampled_workload",
    "selection_gaps",
    "serve_requests",
    "sizes",
    "skew_tests",
]
