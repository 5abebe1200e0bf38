import numpy as np
import pytest

from workbench.workloads.subsets import stratified_split


@pytest.mark.parametrize("seed", [0, 1])
def test_parts_cover_everything_once_with_equal_shares(seed: int) -> None:
    labels = np.repeat([0, 1, 2], [100, 40, 20])
    train, validation, test = stratified_split(labels, validation=0.2, test=0.1, seed=seed)
    assert sorted([*train, *validation, *test]) == list(range(160))
    assert np.bincount(labels[validation]).tolist() == [20, 8, 4]
    assert np.bincount(labels[test]).tolist() == [10, 4, 2]


def test_the_seed_decides() -> None:
    labels = np.arange(200) % 4
    first, again, other = (stratified_split(labels, seed=seed)[0].tolist() for seed in (0, 0, 1))
    assert first == again != other
