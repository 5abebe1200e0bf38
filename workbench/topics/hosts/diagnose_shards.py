"""`Shards`: which examples each host saw in one pass over the data, named so that hosts can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Shards", "shards_of"]

Passes = Mapping[int, Mapping[str, Any]]
"""One pass of each rank, by rank."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Examples by host.

    Attributes:
        examples: of each rank, in their order: positions in the data set they share, or hashes of their content.
        by: "index" or "content".
        size: of the data that the hosts share out; None where it is not known.
        whole: whether each host's part is complete, and not what a short run saw of it.
        why_not: why hosts cannot be compared; None where they can.
    """

    examples: Mapping[int, Sequence[Any]]
    by: str
    size: int | None
    whole: bool
    why_not: str | None = None

    @property
    def holders(self) -> Counter[Any]:
        """On how many hosts each example was."""
        return Counter(example for found in self.examples.values() for example in set(found))

    @property
    def twice(self) -> list[Any]:
        """Examples that were on more than one host."""
        return [example for example, hosts in self.holders.items() if hosts > 1]

    @property
    def missing(self) -> int | None:
        """Examples that were on no host; None where that cannot be known."""
        if self.size is None or not self.whole or self.by != "index":
            return None
        return max(0, self.size - len(self.holders))

    @property
    def with_replacement(self) -> bool:
        """Whether a host drew examples more than once in one pass, beyond what padding explains."""
        return any(len(found) - len(set(found)) >= len(self.examples) for found in self.examples.values())

    @property
    def alike(self) -> bool:
        """Whether two hosts saw the same examples in the same order."""
        orders = [tuple(found) for found in self.examples.values() if len(found)]
        return len(set(orders)) < len(orders)


def shards_of(passes: Passes, *, augmented: bool) -> Shards:
    """Name the examples of one pass of all hosts.

    Positions are compared where all hosts have the same data set. Where each has one of its own, contents are, unless examples
    are augmented: then their contents change, and nobody can tell from outside.

    Args:
        passes: one of each rank.
        augmented: whether random numbers are drawn for an example.
    """
    sets = [p["dataset"] for p in passes.values()]
    stream = any(found["stream"] for found in sets)
    same = len({(found["hash"], found["length"], found["kind"]) for found in sets}) == 1
    index = {rank: _positions(p) for rank, p in passes.items()}
    content = {rank: list(p["contents"]) for rank, p in passes.items()}
    if same and not stream and sets[0]["hash"] is None and _same_position_other_content(passes):
        same = False
    if same and not stream:
        whole = all(p["exhausted"] or p["planned"] for p in passes.values())
        return Shards(examples=index, by="index", size=_size(passes), whole=whole)
    if augmented or not all(content.values()):
        why = (
            "each host has a data set of its own, and augmentation hides which examples are alike"
            if augmented
            else "each host has a data set of its own, and its examples hold no numbers to compare"
        )
        return Shards(examples=content, by="content", size=None, whole=False, why_not=why)
    return Shards(examples=content, by="content", size=None, whole=False)


def _positions(one: Mapping[str, Any]) -> list[Any]:
    return list(one["planned"] if one["planned"] and not one["exhausted"] else one["indices"])


def _size(passes: Passes) -> int | None:
    """Return the length of the smallest part of the data that all hosts have in common."""
    levels = [p.get("levels") or [] for p in passes.values()]
    for level in levels[0]:
        if all(level in other for other in levels[1:]):
            return int(level[0])
    length = next(iter(passes.values()))["dataset"]["length"]
    return None if length is None else int(length)


def _same_position_other_content(passes: Passes) -> bool:
    """Tell whether hosts have different examples at the same positions: shards that were made before the loader."""
    known: dict[Any, str] = {}
    same = other = 0
    for found in passes.values():
        for position, content in zip(found["indices"], found["contents"], strict=False):
            if position in known:
                same, other = same + (known[position] == content), other + (known[position] != content)
            else:
                known[position] = content
    return other > same
