"""What the report and the pages have to know of this question."""

from typing import Any

import numpy as np

from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure, Topic
from workbench.plots.words import counted, number_text
from workbench.topics.recommendation.figures import plot_proof


def _proof_numbers(record: Any, diagnosis: Diagnosis) -> str:
    found = diagnosis.recommendation or {}
    proof = found["proof"]
    candidate = np.asarray(proof["candidate"], dtype=np.float64)
    sign = -1 if found.get("select_mode", record.config.get("select_mode")) == "max" else 1
    lines = []
    for arm in proof["arms"]:
        values = np.asarray(arm["values"], dtype=np.float64)
        better = int((sign * candidate < sign * values).sum())
        lines.append(
            f"better than the {arm['name']} under {better} of {counted(len(values), 'seed')} "
            f"(mean {number_text(float(candidate.mean()))} against {number_text(float(values.mean()))})"
        )
    return f"The candidate is {' and '.join(lines)}."


TOPIC = Topic(
    name="recommendation",
    codes={},
    figures=(
        Figure(
            name="proof",
            shows="Selected checkpoint of every seed, baseline against candidate.",
            caption="Lines that all go the same way speak for the candidate; lines that cross say that the seed decides.",
            codes=(),
            draw=plot_proof,
            numbers=_proof_numbers,
            alone=True,
        ),
    ),
)
