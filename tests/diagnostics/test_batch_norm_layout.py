"""Whose examples make a statistic: held against dealing the examples out one by one."""

from __future__ import annotations

import itertools

import pytest

from workbench.errors import UsageError
from workbench.topics.batch_norm.replicas import statistics_layout


@pytest.mark.parametrize(
    ("batch_size", "hosts", "asked"), list(itertools.product([64, 256], [1, 2, 8, 16], [2, 16, 64, 256, None]))
)
def test_it_is_what_dealing_the_examples_out_gives(batch_size: int, hosts: int, asked: int | None) -> None:
    layout = statistics_layout(batch_size, hosts, asked)
    each = batch_size // hosts
    wanted = each if asked is None else min(asked, batch_size)
    groups: list[int] = []  # join hosts until a statistic has what it asks for
    for _ in range(hosts):
        if groups and groups[-1] * each < wanted:
            groups[-1] += 1
        else:
            groups.append(1)
    assert layout.statistics == len(groups)
    assert layout.hosts_each == groups[0]
    assert layout.examples == wanted
    assert layout.synchronised == (each < wanted)


def test_a_subsample_leaves_examples_out() -> None:
    assert statistics_layout(256, 2, 32).left_out == pytest.approx(0.75)
    assert statistics_layout(256, 2, None).left_out == 0.0
    assert "75% of the examples make no statistic (P6.6)" in statistics_layout(256, 2, 32).words


def test_few_examples_are_told() -> None:
    assert "Below 16 examples" in statistics_layout(64, 8, None).words
    assert "Below 16 examples" not in statistics_layout(128, 8, None).words


def test_a_single_statistic_needs_no_merging() -> None:
    assert "merge" not in statistics_layout(64, 8, 64).words
    assert "merge" in statistics_layout(64, 8, 8).words


@pytest.mark.parametrize(("given", "said"), [((64, 3, 8), "cannot be split over hosts=3"), ((64, 0, 8), "hosts=0"), ((64, 2, 0), "stat_examples=0"), ((0, 1, None), "batch_size=0"), ((64, True, 8), "hosts=True")])  # fmt: skip
def test_what_cannot_be_dealt_out_is_refused(given: tuple[int, int, int | None], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        statistics_layout(*given)
