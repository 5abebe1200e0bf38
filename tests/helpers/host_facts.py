"""What the ranks of a healthy job would write down, with anything in it changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.findings.audited import Audit

EXAMPLES, STEPS = 40, 20


def one_pass(indices: list[int], steps: tuple[int, int], *, number: int = 0, **changes: Any) -> dict[str, Any]:
    """A pass over a loader, of training where steps were made in it."""
    trains = steps[1] > steps[0]
    kind, length, crc = ("Data", EXAMPLES, "d0") if trains else ("Data", 10, "d1")
    found = {
        "loader": 0 if trains else 1, "pass": number, "dataset": {"kind": kind, "length": length, "stream": False, "hash": crc}, "levels": [],
        "sampler": "DistributedSampler" if trains else "SequentialSampler", "distributed": trains, "shuffles": trains,
        "epoch": number if trains else None, "set_epoch_calls": number + 1 if trains else 0, "planned": None, "batch_size": 2,
        "drop_last": False, "steps": list(steps), "exhausted": True, "grad": trains, "indices": list(indices),
        "contents": [f"c{i}" for i in indices],
    }  # fmt: skip
    return found | changes


def rank_facts(rank: int, world: int) -> dict[str, Any]:
    """The facts of one rank of a healthy job: two epochs of ten updates each, an evaluation, a log and a checkpoint."""
    order = [np.random.default_rng(epoch).permutation(EXAMPLES).tolist() for epoch in (0, 1)]
    checked, moments = (0, 1, 2, 3, 4, 8, 16), ("0 training", "10 evaluation", "10 training", "20 evaluation", "20 checkpoint", "20 end")  # fmt: skip
    jitter = np.random.default_rng([7, rank]).uniform(0.9, 1.1, STEPS - 1)
    buffers = [
        {"step": int(step), "moment": moment, "hash": f"b{step}", "means": [0.1 * int(step), 1.0], "variances": [1.0, 2.0]}
        for step, moment in (m.split() for m in moments) if rank == 0 or moment != "checkpoint"
    ]  # fmt: skip
    return {
        "rank": rank, "world": world, "pid": 100 + rank, "host": f"machine{rank}", "cores": 8, "initialised": True, "steps": STEPS,
        "wrappers": [{"kind": "DistributedDataParallel", "before": "p0", "broadcast_buffers": True}],
        "calls": {"wrapped": STEPS, "raw": 0, "other": 0}, "raw_steps": [],
        "evaluations": [{"step": 10, "output_sum": 1.0 + rank}, {"step": 20, "output_sum": 2.0 + rank}],
        "parameters": [{"optimizer": 0, "step": s, "hash": f"p{s}", "sharded": False} for s in checked],
        "gradients": [{"optimizer": 0, "step": s, "before_clip": f"g{s}", "at_step": f"c{s}"} for s in checked],
        "clips": [{"step": s, "optimizer": 0, "by": "clip_grad_norm_", "limit": 1.0} for s in range(STEPS)],
        "times": {"step_s": [0.02] * (STEPS - 1), "busy_s": (0.01 * jitter).tolist()}, "buffers": buffers,
        "joined": {"training": [10, 20], "evaluation": [10, 20]},
        "passes": [
            one_pass(order[0][rank::world], (0, 10)), one_pass(list(range(rank, 10, world)), (10, 10)),
            one_pass(order[1][rank::world], (10, 20), number=1), one_pass(list(range(rank, 10, world)), (20, 20), number=1),
        ],
        "draws": [{"where": "item", "worker": None, "generator": "torch", "state": 1000 * rank + k} for k in range(1, 9)],
        "files": [{"path": "/runs/log.csv", "kind": "log"}, {"path": "/runs/last.pt", "kind": "checkpoint"}] if rank == 0 else [],
    }  # fmt: skip


def job(world: int = 2, **changed: Any) -> Audit:
    """A healthy job; `printed` and other fields of the job beside its ranks may be given."""
    ranks = [rank_facts(rank, world) for rank in range(world)]
    return Audit(facts={"hosts": {"hosts": world, "ranks": ranks, "printed": {}, **changed}}, workload="planted")
