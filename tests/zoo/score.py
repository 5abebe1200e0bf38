"""Score results: how often the right finding stands first, how often health raises an alarm; shares with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]


def alarms(said: Result) -> list[str]:
    """Return the codes of warnings and failures, in the order they are printed."""
    return [f["code"] for f in said["findings"] if f["status"] in ("fail", "warn")]


def _within(said: Result, top: int | None) -> bool:
    return bool(set(alarms(said)[:top]) & set(said["accepts"]))


FAULT_SCORES: dict[str, Callable[[Result], bool]] = {
    "detected": lambda said: _within(said, None),
    "first": lambda said: _within(said, 1),
    "top three": lambda said: _within(said, 3),
    "no alarm": lambda said: not alarms(said) and not said.get("crash"),
    "crash": lambda said: bool(said.get("crash")),
    "first advice": lambda said: said.get("advice_code") in said["accepts"],
}
HEALTHY_SCORES: dict[str, Callable[[Result], bool]] = {
    "fail": lambda said: said.get("verdict") == "fail",
    "any alarm": lambda said: bool(alarms(said)),
    "plain ok": lambda said: said.get("verdict") == "ok",
    "crash": lambda said: bool(said.get("crash")),
}
RETRAINED_SCORES: dict[str, Callable[[Result], bool]] = {
    name: lambda found, name=name: found["result"] == name for name in ("better", "same", "worse")
}
PAIR_SCORES: dict[str, Callable[[Result], bool]] = {"same alarms": lambda said: said["same"]}


def paired(told: Sequence[Result]) -> list[Result]:
    """Return the pairs whose other member is there too, with "same": do both raise the same alarms."""
    by_name = {said["case"]: said for said in told}
    pairs = [said for said in told if said["case"].startswith("pair/")]
    both = [(said, by_name.get(said["case"].split("/", 2)[2])) for said in pairs]
    return [
        {**said, "twin": alarms(twin), "same": set(alarms(said)) == set(alarms(twin))} for said, twin in both if twin
    ]


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    if not total:
        return 0.0, 1.0
    share, spread = right / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / 4 / total)
    return max(0.0, centre - half), min(1.0, centre + half)


def share(told: Sequence[Result], right: Callable[[Result], bool]) -> str:
    """Return the percentage of results that are `right`, with its interval."""
    count = sum(map(right, told))
    low, high = wilson(count, len(told))
    return f"{100 * count / max(len(told), 1):.0f} ({100 * low:.0f} to {100 * high:.0f})"
