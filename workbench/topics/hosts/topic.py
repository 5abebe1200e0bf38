"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import NARROW, Figure, StudyKind, Topic
from workbench.topics.hosts.diagnose import diagnose_hosts
from workbench.topics.hosts.figures import plot_hosts, plot_shards
from workbench.topics.hosts.ranks import CODES

TOPIC = Topic(
    name="hosts",
    codes=CODES,
    figures=(
        Figure(
            name="hosts",
            shows="Milliseconds of a step that each host is busy, and that it waits for the others.",
            caption="Bars of one length are healthy; a host that is busy much longer makes all others wait by the difference.",
            codes=("hosts.straggler",),
            draw=plot_hosts,
            facts="hosts",
            size=(NARROW, 3.0),
        ),
        Figure(
            name="shards",
            shows="Which examples each host trained on.",
            caption="Every example on one host is healthy; red marks are examples that several hosts saw, and the lowest row those that "
            "nobody did.",
            codes=("hosts.sharding",),
            draw=lambda record, _, *, ax: plot_shards(record, ax=ax),
            facts="hosts",
            size=(NARROW, 3.0),
        ),
    ),
    studies={
        "hosts": StudyKind(diagnose=diagnose_hosts, pictures=("hosts",)),
    },
)
