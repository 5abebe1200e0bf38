"""The table of behaviours is that of the tests: each number is there once, and some test says that it holds it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from workbench.config import TrainConfig
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.checkpoint_manager import CheckpointManager

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "behaviours.md"
NUMBERS = re.compile(r"[Bb]ehaviours? ((?:\d+(?:, | and )?)+)")


def held() -> Iterator[tuple[int, str]]:
    """Every number that the docstring of a test names, with that test."""
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for found in NUMBERS.findall(ast.get_docstring(node) or ""):
                    yield from ((int(number), node.name) for number in re.findall(r"\d+", found))


def test_each_behaviour_of_the_page_is_held_by_a_test_that_names_it() -> None:
    """The page says where it is not the same."""
    rows = re.findall(r"^\| (\d+) \| .+ \| (kept|lifted|differs|absent) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 89))
    assert {int(number) for number, _, _ in rows} == {number for number, _ in held()}
    assert all(here != "the same" for _, fate, here in rows if fate != "kept")


def test_what_was_split_is_stored_whole_and_loads_without_a_cluster(
    strategy: ParameterServerStrategy, tmp_path: Path
) -> None:
    """Behaviour 78, T14.4."""
    split = ParameterServerStrategy(strategy.cluster, variable_partitioner=FixedShardsPartitioner(2))
    net = nn.Linear(3, 4)
    placed = split.place(net, TrainConfig(peak_lr=0.1, total_steps=1, batch_size=1))
    assert len(placed.shards("weight")) == 2
    path = CheckpointManager(placed, tmp_path).save()
    plain = nn.Linear(3, 4)
    plain.load_state_dict(load_file(path / "model.safetensors"))
    assert torch.equal(plain(torch.ones(2, 3)), net(torch.ones(2, 3)))


def test_gradients_are_applied_in_full_and_reads_are_never_cached(
    strategy: ParameterServerStrategy, coordinator: ClusterCoordinator
) -> None:
    """Behaviour 79: three workers' gradients of 1 at lr 1, twice each; a second read sees what was written since the first."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    config = TrainConfig(peak_lr=1.0, total_steps=9, batch_size=1, optimizer="sgd")
    placed = strategy.place(net, config)

    def push() -> None:
        with placed.step() as module:
            module(torch.ones(1, 1)).sum().backward()

    for _ in range(6):
        coordinator.schedule(push)
    coordinator.join()
    assert float(placed.module().weight.detach()) == pytest.approx(-6.0)
    count = strategy.variable(1.0)

    def read_write_read() -> tuple[float, float]:
        first = float(count)
        count.assign_add(1.0)
        return first, float(count)

    assert coordinator.schedule(read_write_read).fetch() == (1.0, 2.0)
