"""Are the examples what they should be: finite, shuffled, unlike those of validation?"""

from workbench.curves.class_counts import class_counts as class_counts
from workbench.topics.data.collect import audit_data as audit
from workbench.topics.data.diagnose import diagnose_data as diagnose
from workbench.topics.data.overlap import find_overlap as find_overlap
from workbench.workloads.subsets import draw_sample as draw_sample

__all__ = ["audit", "class_counts", "diagnose", "draw_sample", "find_overlap"]
