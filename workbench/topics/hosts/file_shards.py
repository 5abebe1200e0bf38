"""`shard_files`, `measure_file_shards`: which files each host reads, and what it costs when every host reads all of them (P7.4).

Run as `python -m workbench.topics.hosts.file_shards SPEC` it is one host that reads record files.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.checks import check_integer
from workbench.errors import ClusterError, DataError, UsageError

if TYPE_CHECKING:
    import pandas as pd


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


def measure_file_shards(
    paths: Sequence[str | Path], *, hosts: int = 4, record_bytes: int = 4096, timeout_s: float = 120.0
) -> pd.DataFrame:
    """Read files on several processes at once, each its own files, then each all of them, and return what it took.

    Records have a fixed size, and each one that is read is checked by its checksum, as readers of record files do. A host that reads
    all files keeps every `hosts`-th record, so that either way each record is trained on once.

    Args:
        hosts: processes.
        timeout_s: for one way of reading.

    Returns:
        One row for each way and host: files ("sharded", "all"), host, bytes_read, examples, seconds.

    Raises:
        UsageError: an argument is out of its range.
        DataError: a file is missing, or there are fewer files than hosts.
        ClusterError: a process did not read to the end.

    Source: P7.4 (sharded files usually improve performance: the claim that this measures).
    """
    check_integer("record_bytes", record_bytes, error=UsageError)
    import pandas as pd

    shares = shard_files(paths, hosts)
    every = sorted(path for share in shares for path in share)
    own = [{"files": share, "keep": [0, 1]} for share in shares]
    rows = _read("sharded", own, record_bytes, timeout_s)
    rows += _read("all", [{"files": every, "keep": [host, hosts]} for host in range(hosts)], record_bytes, timeout_s)
    return pd.DataFrame(rows)


def _read(way: str, parts: list[dict[str, Any]], record_bytes: int, timeout_s: float) -> list[dict[str, Any]]:
    """Start a process for each part, let all of them begin at once, and return what each read."""
    from workbench.topics.hosts.launch import package_environment

    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with contextlib.ExitStack() as stack:
        readers = []
        for part in parts:
            spec = json.dumps(
                {**part, "files": [str(p.resolve()) for p in part["files"]], "record_bytes": record_bytes}
            )
            command = [sys.executable, "-m", "workbench.topics.hosts.file_shards", spec]
            reader = stack.enter_context(subprocess.Popen(command, env=package_environment(), text=True, **pipes))
            stack.callback(reader.kill)
            readers.append(reader)
        for reader in readers:
            reader.stdout.readline()  # type: ignore[union-attr]  # it is ready
        rows = []
        try:
            for reader in readers:
                print("go", file=reader.stdin, flush=True)
            for host, reader in enumerate(readers):
                out, error = reader.communicate(timeout=timeout_s)
                if reader.returncode:
                    raise ClusterError(f"process {host} could not read its files: {error.strip().splitlines()[-1:]}.")
                rows.append({"files": way, "host": host, **json.loads(out)})
        except (subprocess.TimeoutExpired, BrokenPipeError) as error:
            said = f"reading ({way} files) did not end within {timeout_s:g} s, or a process ended early."
            raise ClusterError(said) from error
    return rows


def read_records(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Read every record of the "files", and keep those of "keep", [host, hosts], of all records in their order."""
    start, size = time.perf_counter(), int(spec["record_bytes"])
    first, every = spec["keep"]
    read = kept = seen = 0
    for name in spec["files"]:
        with Path(name).open("rb") as file:
            while record := file.read(size):
                read += len(record)
                zlib.crc32(record)
                kept += seen % every == first
                seen += 1
    return {"bytes_read": read, "examples": kept, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(read_records(json.loads(sys.argv[1]))), flush=True)
