"""A Ray cluster of this process, started once for all tests that need one, and never where none does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    pytest.importorskip("ray")
    from workbench.ray.cluster import RayCluster

    cluster = RayCluster.connect()
    yield
    cluster.close()
