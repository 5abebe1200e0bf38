"""`workbench.Trainer` on many hosts with one thing taken out of it: what an audit of it has to find."""

import contextlib
import sys
from typing import Any

import workbench as wb
from workbench.train import loop
from workbench.train.distributed.data_parallel import average_gradients

HOW, OUT = sys.argv[1:]


def own_gradients(hosts: Any, grad: Any, local: Any, *, examples: int) -> Any:
    """Each host keeps its own gradient; only the losses are averaged."""
    return average_gradients(hosts, grad.clone(), local, examples=examples)


if HOW == "gradients":
    loop.average_gradients = own_gradients
if HOW == "statistics":
    loop.merged_running_statistics = lambda model: contextlib.nullcontext()

workload = wb.load_workload("digits_cnn")
config = workload.config.replace(total_steps=25, max_grad_norm=1.0)
wb.Trainer(device="cpu").run(workload, config, out=OUT)
