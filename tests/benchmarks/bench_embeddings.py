"""Bytes and steps/s of a trained embedding on parameter servers, by number of rows.

    python tests/benchmarks/bench_embeddings.py [--engine ray] [--seconds 4] [--rounds 2] [--embeddings whole adagrad lazy_adam]

A table of rows x 16, a linear layer, 96 ids a step, Adam, two workers and two servers. "whole" moves the table, as any parameter.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

import workbench as wb

WIDTH, IDS = 16, 96


def step(placed: Any, rows: int, count: int) -> None:
    for _ in range(count):
        ids = torch.randint(rows, (IDS // 3, 3))
        with placed.step() as model:
            model(ids).pow(2).mean().backward()


class Net(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embedding, self.dense = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.embedding(ids).mean(1))


def measure(cluster: Any, rows: int, embeddings: str, seconds: float) -> None:
    config = wb.TrainConfig(optimizer="adam", peak_lr=0.01, total_steps=1000, batch_size=32)
    strategy = wb.ps.Strategy(cluster, variable_partitioner=wb.ps.FixedShardsPartitioner(2))
    coordinator = wb.ps.ClusterCoordinator(strategy)
    placed = strategy.place(Net(rows), config, embeddings=None if embeddings == "exact" else embeddings)
    coordinator.on_every_worker(step, (placed, rows, 1))

    def moved() -> int:
        reports = [cluster.engine.plane.ask(k, "load_report") for k in range(2)]
        return sum(block["bytes_in"] + block["bytes_out"] for each in reports for block in each.values())

    before, first, begun = moved(), placed.steps, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for _ in range(4):
            coordinator.schedule(step, (placed, rows, 5))
        coordinator.join()
    took, steps = time.perf_counter() - begun, placed.steps - first
    each = (moved() - before) / steps
    said = f"{steps / took:.1f} steps/s, {each:,.0f} bytes a step, {each / (2 * IDS * WIDTH * 4):.2f} x the rows'"
    print(f"{cluster.engine.name} {rows:,} x {WIDTH} {embeddings}: {said}", flush=True)
    placed.delete()
    coordinator.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="ray")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--embeddings", nargs="*", default=["whole", "exact", "sgd", "lazy_adam", "adagrad", "ftrl"])
    given = parser.parse_args()
    with wb.ps.create_in_process_cluster(2, 2, engine=given.engine) as cluster:
        for rows in given.rows:
            for embeddings in given.embeddings * given.rounds:
                measure(cluster, rows, embeddings, given.seconds)
