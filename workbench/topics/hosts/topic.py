"""Does training over several processes do what one process would?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import NARROW, Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.topics.hosts.diagnose import diagnose_hosts as diagnose
from workbench.topics.hosts.diagnose import host_areas as areas
from workbench.topics.hosts.diagnose_update import CODES
from workbench.topics.hosts.figures import plot_hosts as plot
from workbench.topics.hosts.figures import plot_shards

if TYPE_CHECKING:
    from workbench.topics.hosts.file_shards import measure_file_shards, shard_files
    from workbench.topics.hosts.study import HostsStudy as Study
    from workbench.topics.hosts.study import audit_hosts as audit
    from workbench.topics.hosts.study import audit_script
    from workbench.topics.hosts.study import read_hosts as read
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = [
    "Study",
    "areas",
    "audit",
    "audit_script",
    "diagnose",
    "measure_file_shards",
    "plot",
    "plot_shards",
    "read",
    "shard_files",
]

TOPIC = Topic(
    name="hosts",
    codes=CODES,
    figures=(
        Figure(
            name="hosts",
            shows="Milliseconds of a step that each rank is busy, and that it waits for the others.",
            caption="Bars of one length are healthy; a rank that is busy much longer makes all others wait by the difference.",
            codes=("hosts.straggler",), draw=plot, facts="hosts", size=(NARROW, 3.0),
        ),
        Figure(
            name="shards",
            shows="Which examples each rank trained on.",
            caption="Every example on one rank is healthy; red marks are examples that several ranks saw, and the lowest row those that "
            "nobody did.",
            codes=("hosts.sharding",), draw=lambda record, _, *, ax: plot_shards(record, ax=ax), facts="hosts", size=(NARROW, 3.0),
        ),
    ),
    studies={"hosts": StudyKind(diagnose=diagnose, pictures=("hosts",))},
)  # fmt: skip
