"""Does what `diagnose` compared on the validation set hold on the test set, which decided nothing (P3.4, P3.5)?

workbench diagnose digits_cnn --out runs/one
python tests/benchmarks/held_out.py digits_cnn runs/one
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import workbench as wb
from workbench.record.read import StudyRecord
from workbench.topics.evaluation.collect import pair_facts, selected_model
from workbench.topics.evaluation.diagnose_sample import diagnose_evaluation_sample
from workbench.train.evaluation import example_values


def main() -> None:
    """Print the difference of the compared pairs on both sets, with its standard error over the examples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("study")
    given = parser.parse_args()
    workload, record = wb.load_workload(given.workload), StudyRecord(Path(given.study))
    facts = record.facts["evaluation_sample"]
    print(facts["compared"], diagnose_evaluation_sample(record)["evaluation.too_small"], sep="\n")
    device = torch.device("cpu")
    for split in ("validation", "test"):
        pairs = []
        for numbers in facts["pair"]["trials"]:
            models = [selected_model(workload, workload.config, record, number, device) for number in numbers]
            one, other = (
                example_values(
                    workload, model, split=split, batch_size=256, device=device, precision=workload.config.precision
                )
                for model in models
            )
            pairs.append((one, other))
        for metric in ("loss", *workload.metrics):
            found = pair_facts(pairs, metric=metric)
            se = found["difference_sd"] / len(pairs[0][0].weights) ** 0.5
            print(
                f"{split}/{metric}: {found['values'][0]:.4f} -> {found['values'][1]:.4f}, difference {found['difference']:+.4f} +- {se:.4f}"
            )


if __name__ == "__main__":
    main()
