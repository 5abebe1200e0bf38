"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, Topic
from workbench.topics.recommendation.captions import proof_numbers
from workbench.topics.recommendation.figures import plot_proof

__all__ = ["TOPIC"]


TOPIC = Topic(
    name="recommendation",
    figures=(
        Figure(
            name="proof",
            shows="Selected checkpoint of every seed, baseline against candidate.",
            caption="Lines that all go the same way speak for the candidate; lines that cross say that the seed decides.",
            codes=(),
            draw=plot_proof,
            numbers=proof_numbers,
            alone=True,
        ),
    ),
)
