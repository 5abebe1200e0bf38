"""`python -m workbench.topics.hosts.file_reader SPEC`: one host that reads record files; the standard library alone, so it starts at once."""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["main", "read_records"]


def read_records(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Read every record of the files, and keep those that belong to this host.

    Args:
        spec: "files", "record_bytes", and "keep": [host, hosts], of all records in their order.

    Returns:
        {"bytes_read", "examples", "seconds"}.
    """
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


def main(words: list[str]) -> None:
    """Say that this host is ready, wait for a line, read, and print what it took."""
    spec = json.loads(words[0])
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(read_records(spec)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
