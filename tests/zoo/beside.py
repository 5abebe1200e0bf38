"""Other tools' alarms beside ours, from what `tests.zoo.peers` kept: any alarm at all, since each tool names faults in its own way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.zoo.score import Result, alarms, share

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
