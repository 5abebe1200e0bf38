"""Which update rule, with which constants?"""

from workbench.topics.optimizers.diagnose import better_rule as better_rule
from workbench.topics.optimizers.diagnose import diagnose_optimizers as diagnose
from workbench.topics.optimizers.figures import plot_optimizers as plot
from workbench.topics.optimizers.figures import plot_rule_forms as plot_rule_forms
from workbench.topics.optimizers.rule_forms import explain_rule as explain_rule
from workbench.topics.optimizers.study import OptimizersStudy as Study

__all__ = ["Study", "better_rule", "diagnose", "explain_rule", "plot", "plot_rule_forms"]
