"""Does training over several processes do what one process would?"""

from workbench.topics.hosts.diagnose import diagnose_hosts as diagnose
from workbench.topics.hosts.diagnose import host_areas as areas
from workbench.topics.hosts.figures import plot_bytes_read as plot_bytes_read
from workbench.topics.hosts.figures import plot_hosts as plot
from workbench.topics.hosts.figures import plot_shards as plot_shards
from workbench.topics.hosts.file_shards import measure_file_shards as measure_file_shards
from workbench.topics.hosts.file_shards import shard_files as shard_files
from workbench.topics.hosts.study import HostsStudy as Study
from workbench.topics.hosts.study import audit_hosts as audit
from workbench.topics.hosts.study import audit_script as audit_script
from workbench.topics.hosts.study import read_hosts as read
from workbench.topics.hosts.study import self_test_hosts as self_test

__all__ = [
    "Study",
    "areas",
    "audit",
    "audit_script",
    "diagnose",
    "measure_file_shards",
    "plot",
    "plot_bytes_read",
    "plot_shards",
    "read",
    "self_test",
    "shard_files",
]
