"""One trial on several processes: our trainer against a plain DistributedDataParallel script, side by side.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/bench_hosts.py digits_mlp source_text --steps 400

Both sides train the same model with shares of the same size, in the same processes, round about. The plain script does
nothing but the steps: no record, no evaluation, no norms. A ratio of 1 is as fast; below 0.98 ours is too slow.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bare import indexed, optimizer_of
from timing import machine, median, ratio
from torch.nn.parallel import DistributedDataParallel

import workbench as wb


def plain(workload: wb.Workload, config: wb.TrainConfig) -> float:
    """Train with DDP as its documentation has it; return the seconds of a step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.build_model())
    optimizer = optimizer_of(model, config)
    torch.manual_seed(dist.get_rank())
    batches = indexed(workload, config.batch_size // dist.get_world_size())
    dist.barrier()
    start = time.perf_counter()
    for _ in range(config.total_steps):
        batch = next(batches)
        optimizer.zero_grad()
        workload.loss(workload.forward(model, batch), batch).mean().backward()
        optimizer.step()
    dist.barrier()
    return (time.perf_counter() - start) / config.total_steps


def ours(workload: wb.Workload, config: wb.TrainConfig) -> float:
    """Train with `Trainer`; return the seconds of a step, everything but evaluations included."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        dist.barrier()
        record = wb.Trainer(device="cpu").run(workload, config, out=Path(shared[0]) / "trial")
        steps = record.steps["step_time_s"].to_numpy()
        dist.barrier()
    return float(steps.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", help="bundled workloads")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(machine(), f"{dist.get_world_size()} processes, one thread each", flush=True)
    for name in asked.workloads:
        workload = wb.load_workload(name)
        config = workload.config.replace(total_steps=asked.steps, eval_every_steps=asked.steps)
        took: dict[str, list[float]] = {"plain": [], "ours": []}
        for number in range(-1, asked.rounds):
            for side, run in (("plain", plain), ("ours", ours)) if number % 2 else (("ours", ours), ("plain", plain)):
                seconds = run(workload, config)
                if number >= 0:
                    took[side].append(1e3 * seconds)
        both = ", ".join(f"{side} {median(each):.2f} ms" for side, each in took.items())
        say(f"{name}: {both} a step; plain / ours {ratio(took['plain'], took['ours'])}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
