"""Score results: how often the right finding stands first, how often health raises an alarm, and what was missed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    if not total:
        return 0.0, 1.0
    share, spread = right / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / 4 / total)
    return max(0.0, centre - half), min(1.0, centre + half)


def row(name: str, told: Sequence[Result], scores: Mapping[str, Callable[[Result], bool]]) -> str:
    """Return a line of a Markdown table: shares in percent with their intervals."""
    cells = [name, str(len(told))]
    for right in scores.values():
        count = sum(map(right, told))
        low, high = wilson(count, len(told))
        cells.append(f"{100 * count / max(len(told), 1):.0f} ({100 * low:.0f}-{100 * high:.0f})")
    return f"| {' | '.join(cells)} |"


def table(groups: Iterable[tuple[str, Sequence[Result]]], scores: Mapping[str, Callable[[Result], bool]]) -> str:
    """Return a Markdown table with one line a group."""
    head = ["% (95 % interval)", "cases", *scores]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    return "\n".join([*lines, *(row(name, told, scores) for name, told in groups if told)])


def _groups(told: Sequence[Result], *, areas: bool) -> list[tuple[str, list[Result]]]:
    groups = [("all", list(told))]
    groups += [(f"half: {half}", [s for s in told if s["half"] == half]) for half in ("tune", "scored")]
    if areas:
        groups += [(area, [s for s in told if s["area"] == area]) for area in dict.fromkeys(s["area"] for s in told)]
    return groups


def _line(said: Result) -> str:
    if said.get("crash"):
        return f"| {said['case']} | {' '.join(said['accepts'][:2])} | CRASH {said['crash'][:150]} |"
    shown = [
        f"{f['status']} {f['code']}: {f['summary'][:110]}" for f in said["findings"] if f["status"] != "not_measured"
    ]
    found = next((k + 1 for k, code in enumerate(alarms(said)) if code in said["accepts"]), None)
    place = f" (right one at {found})" if found else ""
    text = "; ".join(shown[:3]) or f"nothing, verdict {said.get('verdict')}: " + ", ".join(
        f["code"] for f in said["findings"][:4]
    )
    return f"| {said['case']} | {' '.join(said['accepts'][:2])} | {text}{place} |".replace("\n", " ")


def report(told: Sequence[Result], *, listed: Collection[str] = ("tune",)) -> str:
    """Return the scores as Markdown, and the misses of the halves that may be `listed` by name."""
    faults = [said for said in told if said["accepts"]]
    healthy = [said for said in told if not said["accepts"]]
    parts = [table(_groups(faults, areas=True), FAULT_SCORES)] if faults else []
    parts += [table(_groups(healthy, areas=False), HEALTHY_SCORES)] if healthy else []
    missed = [s for s in faults if s["half"] in listed and not FAULT_SCORES["first"](s)]
    disturbed = [s for s in healthy if s["half"] in listed and not HEALTHY_SCORES["plain ok"](s)]
    for title, group in (
        ("Faults whose name does not stand first", missed),
        ("Controls that are not plain ok", disturbed),
    ):
        if group:
            lines = ["| case | wanted | said |", "| --- | --- | --- |", *map(_line, group)]
            parts.append(f"{title} ({', '.join(listed)} half):\n\n" + "\n".join(lines))
    cost = sum(said["cpu_s"] for said in told) / max(len(told), 1)
    return "\n\n".join([*parts, f"{len(told)} cases, {cost:.1f} s of processor time each."])
