"""Files shared out: disjoint, complete, even; and what every host reads, against the sizes of the files (P7.4)."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import ClusterError, DataError, UsageError
from workbench.topics.hosts.file_shards import measure_file_shards, read_records, shard_files

RECORD = 64


def files(folder: Path, sizes: list[int]) -> list[Path]:
    found = []
    for number, size in enumerate(sizes):
        path = folder / f"part-{number:02d}.bin"
        path.write_bytes(bytes(size))
        found.append(path)
    return found


@pytest.mark.parametrize("hosts", [1, 2, 3, 5, 8])
def test_shares_are_disjoint_complete_and_even(hosts: int, tmp_path: Path) -> None:
    sizes = [int(s) for s in np.random.default_rng(hosts).integers(0, 5000, 23)]
    paths = files(tmp_path, sizes)
    shares = shard_files(paths, hosts)
    assert sorted(itertools.chain(*shares)) == sorted(paths)
    loads = [sum(p.stat().st_size for p in share) for share in shares]
    assert max(loads) <= sum(sizes) / hosts + max(sizes)


def test_every_host_gets_the_same_answer_whatever_the_order(tmp_path: Path) -> None:
    paths = files(tmp_path, [10, 10, 30, 5, 5, 20])
    shuffled = random.Random(0).sample(paths, len(paths))
    assert shard_files(shuffled, 3) == shard_files(paths, 3)


def test_the_best_split_of_a_small_case(tmp_path: Path) -> None:
    loads = [sum(p.stat().st_size for p in share) for share in shard_files(files(tmp_path, [4, 3, 3, 2]), 2)]
    assert sorted(loads) == [6, 6]


def test_bad_input_is_named(tmp_path: Path) -> None:
    paths = files(tmp_path, [1, 2])
    with pytest.raises(DataError, match="2 files are too few for 3 hosts"):
        shard_files(paths, 3)
    with pytest.raises(DataError, match="no file .*missing"):
        shard_files([*paths, tmp_path / "missing.bin"], 2)
    with pytest.raises(UsageError, match="holds a file twice"):
        shard_files([paths[0], paths[0]], 1)
    for hosts in (0, True, 1.5):
        with pytest.raises(UsageError, match="hosts="):
            shard_files(paths, hosts)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="record_bytes=0"):
        measure_file_shards(paths, hosts=2, record_bytes=0)


def test_each_byte_is_read_once_where_files_are_shared_out_and_by_every_host_where_not(tmp_path: Path) -> None:
    paths = files(tmp_path, [RECORD * n for n in (5, 9, 2, 4)])
    total, records = RECORD * 20, 20
    table = measure_file_shards(paths, hosts=2, record_bytes=RECORD)
    own, every = (table[table["files"] == way] for way in ("sharded", "all"))
    assert own["bytes_read"].sum() == total
    assert every["bytes_read"].tolist() == [total, total]
    assert own["examples"].sum() == every["examples"].sum() == records
    assert (table["seconds"] > 0).all()


def test_the_bytes_counted_are_those_that_the_kernel_counts(tmp_path: Path) -> None:
    (path,) = files(tmp_path, [RECORD * 1000])
    counter = Path("/proc/self/io")
    if not counter.exists():
        pytest.skip("only Linux counts them")

    def read_so_far() -> int:
        return int(counter.read_text().split("rchar:")[1].split()[0])

    before = read_so_far()
    found = read_records({"files": [str(path)], "record_bytes": RECORD, "keep": [0, 3]})
    after = read_so_far()
    assert found["bytes_read"] == RECORD * 1000
    assert 0 <= after - before - found["bytes_read"] < 5000  # reading the counter itself
    assert found["examples"] == 334


def test_a_file_that_goes_away_is_an_error_and_leaves_no_process(tmp_path: Path) -> None:
    paths = files(tmp_path, [RECORD, RECORD])
    with pytest.raises(ClusterError, match="did not end within"):
        measure_file_shards(paths, hosts=2, record_bytes=RECORD, timeout_s=1e-6)
