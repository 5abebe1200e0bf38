"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.parameter_server.diagnose import CODES, diagnose_parameter_server
from workbench.topics.parameter_server.figures import plot_server_load, plot_staleness, plot_throughput

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
            draw=plot_server_load,
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
        "parameter_server": StudyKind(diagnose=diagnose_parameter_server, pictures=("server-load",)),
    },
)
