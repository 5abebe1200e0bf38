"""`shard_files`, `measure_file_shards`: which files each host reads, and what it costs when every host reads all of them (P7.4)."""

import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from workbench.checks import check_integer
from workbench.errors import DataError, UsageError

RECORD_BYTES = 4096  # of a record, as long as a small image or a line of text (rule of thumb)


def shard_files(paths: Sequence[str | Path], hosts: int) -> list[list[Path]]:
    """Share files out over hosts: each file to one host, and bytes as even as files allow.

    The largest file first, to the host that has least so far; every host gets the same answer, whatever the order of `paths`. No
    host has more than the mean plus the largest file.

    Args:
        hosts: number of hosts; the answer of host `rank` is entry `rank`.

    Raises:
        UsageError: `hosts` is below 1, or a path comes twice.
        DataError: a file is missing, or there are fewer files than hosts, so that some would have nothing to read.

    Source: P7.4 (shard the data files across hosts).
    """
    check_integer("hosts", hosts, error=UsageError)
    files = sorted(Path(path) for path in paths)
    if len(set(files)) < len(files):
        raise UsageError("paths holds a file twice: each belongs to one host.")
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise DataError(f"there is no file {str(missing[0])!r} to share out.")
    if len(files) < hosts:
        raise DataError(
            f"{len(files)} files are too few for {hosts} hosts: some would have nothing to read. Write the data as at least "
            f"{hosts} files, better several for each host."
        )
    shares: list[list[Path]] = [[] for _ in range(hosts)]
    bytes_of = [0] * hosts
    for path in sorted(files, key=lambda p: (-p.stat().st_size, p)):
        least = min(range(hosts), key=lambda host: (bytes_of[host], len(shares[host]), host))
        shares[least].append(path)
        bytes_of[least] += path.stat().st_size
    return [sorted(share) for share in shares]


def measure_file_shards(paths: Sequence[str | Path], *, hosts: int = 4) -> pd.DataFrame:
    """Read files as each host would: its own files, then all of them; one host after the other, as on machines of their own.

    Records have a fixed size, and each one that is read is checked by its checksum, as readers of record files do. A host that reads
    all files keeps every `hosts`-th record, so that either way each record is trained on once.

    Returns:
        One row for each way and host: files ("sharded", "all"), host, bytes_read, examples, seconds.

    Raises:
        UsageError: `hosts` is below 1, or a path comes twice.
        DataError: a file is missing, or there are fewer files than hosts.

    Source: P7.4 (sharded files usually improve performance: the claim that this measures).
    """
    shares = shard_files(paths, hosts)
    every = sorted(path for share in shares for path in share)
    rows = [{"files": "sharded", "host": host, **_read(share, 0, 1)} for host, share in enumerate(shares)]
    rows += [{"files": "all", "host": host, **_read(every, host, hosts)} for host in range(hosts)]
    return pd.DataFrame(rows)


def _read(files: Sequence[Path], first: int, every: int) -> dict[str, float]:
    """Read all records of some files, of which every so many are kept."""
    start, read, seen, kept = time.perf_counter(), 0, 0, 0
    for path in files:
        with path.open("rb") as file:
            while record := file.read(RECORD_BYTES):
                zlib.crc32(record)
                read += len(record)
                kept += seen % every == first
                seen += 1
    return {"bytes_read": read, "examples": kept, "seconds": time.perf_counter() - start}
