"""Score results: how often the right finding stands first, how often health raises an alarm; shares with intervals, and other tools' beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.curves.class_counts import wilson

Result = Mapping[str, Any]


def alarms(said: Result) -> list[str]:
    """Return the codes of warnings and failures, in the order they are printed."""
    return [f["code"] for f in said["findings"] if f["status"] in ("fail", "warn")]


def _within(said: Result, top: int | None) -> bool:
    return bool(set(alarms(said)[:top]) & set(said["accepts"]))


def _first_advice(said: Result) -> bool:
    """Tell whether what a person does first is right: to follow the first advice, or, without any, to train with the config that was adopted."""
    if said.get("advice"):
        return said.get("advice_code") in said["accepts"]
    lr_is_cure = any(code.split(".")[0] in ("lr", "stability") for code in said["accepts"])
    return bool(said.get("adopted")) and "peak_lr" in said["changed"] and lr_is_cure


FAULT_SCORES: dict[str, Callable[[Result], bool]] = {
    "detected": lambda said: _within(said, None),
    "first": lambda said: _within(said, 1),
    "top three": lambda said: _within(said, 3),
    "no alarm": lambda said: not alarms(said) and not said.get("crash"),
    "crash": lambda said: bool(said.get("crash")),
    "first advice": _first_advice,
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


def share(told: Sequence[Result], right: Callable[[Result], bool]) -> str:
    """Return the percentage of results that are `right`, with its interval."""
    count = sum(map(right, told))
    low, high = wilson(count, len(told))
    return f"{100 * count / max(len(told), 1):.0f} ({100 * low:.0f} to {100 * high:.0f})"


Alarms = Mapping[str, list[str] | str]
"""Tool -> alarms of one case, or "raised ..."."""


def peers(folder: Path) -> dict[str, Alarms]:
    """Return what other tools said of each case."""
    kept = sorted(folder.glob("*.json"))
    return {path.stem.replace("--", "/"): json.loads(path.read_text()) for path in kept}


def beside(told: Sequence[Result], others: Mapping[str, Alarms]) -> str:
    """Return a Markdown table with one line a tool, over the cases that all were asked about."""
    both = [said for said in told if said["case"] in others and not said["case"].startswith("pair/")]
    faults, healthy = [s for s in both if s["accepts"]], [s for s in both if not s["accepts"]]
    lines = ["| % (95 % interval) | faults with an alarm | healthy trainings with an alarm | raised |", "| --- | --- | --- | --- |"]  # fmt: skip
    ours = [share(part, lambda said: bool(alarms(said))) for part in (faults, healthy)]
    lines.append(f"| workbench | {ours[0]} | {ours[1]} | {share(both, lambda said: bool(said.get('crash')))} |")
    for tool in dict.fromkeys(tool for said in both for tool in others[said["case"]]):
        asked = [[s for s in part if tool in others[s["case"]]] for part in (faults, healthy)]
        shares = [share(part, lambda s, tool=tool: isinstance(others[s["case"]][tool], list) and bool(others[s["case"]][tool])) for part in asked]  # fmt: skip
        raised = share([*asked[0], *asked[1]], lambda s, tool=tool: isinstance(others[s["case"]][tool], str))
        lines.append(f"| {tool} | {shares[0]} | {shares[1]} | {raised} |")
    return f"{len(faults)} faults, {len(healthy)} healthy trainings.\n\n" + "\n".join(lines)
