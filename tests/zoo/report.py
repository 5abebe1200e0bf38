"""The scores as Markdown and as a picture: `docs/zoo.md`, and the table in the README."""

from __future__ import annotations

import datetime
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from tests.zoo.score import (
    FAULT_SCORES,
    HEALTHY_SCORES,
    PAIR_SCORES,
    RETRAINED_SCORES,
    Alarms,
    Result,
    alarms,
    beside,
    paired,
    share,
)

START, END = "<!-- zoo: written by `make zoo` -->", "<!-- zoo: end -->"


def table(groups: Iterable[tuple[str, Sequence[Result]]], scores: Mapping[str, Callable[[Result], bool]]) -> str:
    """Return a Markdown table of shares in percent, one line a group that has members."""
    lines = [["% (95 % interval)", "cases", *scores]]
    lines += [
        [name, str(len(told)), *(share(told, right) for right in scores.values())] for name, told in groups if told
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def by_code(told: Sequence[Result]) -> str:
    """Return a Markdown table of how often each code warned or failed, one line a code, pairs left out."""
    lines = [
        "| code | faults that accept it | warned there | in other faults | in healthy trainings |",
        "| --- " * 5 + "|",
    ]
    alone = [(set(alarms(said)), said["accepts"]) for said in told if not said["case"].startswith("pair/")]
    for code in sorted(set().union(*(raised.union(accepts) for raised, accepts in alone))):
        wanted = [code in raised for raised, accepts in alone if code in accepts]
        others = sum(code in raised for raised, accepts in alone if accepts and code not in accepts)
        healthy = sum(code in raised for raised, accepts in alone if not accepts)
        lines.append(f"| {code} | {len(wanted)} | {sum(wanted)} | {others} | {healthy} |")
    return "\n".join(lines)


def _groups(told: Sequence[Result], key: str | None = None) -> list[tuple[str, list[Result]]]:
    groups = [("all", list(told))]
    groups += [(f"half: {half}", [s for s in told if s["half"] == half]) for half in ("tune", "scored")]
    if key:
        groups += [(name, [s for s in told if s[key] == name]) for name in dict.fromkeys(s[key] for s in told)]
    return groups


def _line(said: Result) -> str:
    wanted = " ".join(said["accepts"][:2])
    if said.get("crash"):
        text = f"CRASH {said['crash'][:150]}"
    else:
        shown = [
            f"{f['status']} {f['code']}: {f['summary'][:110]}"
            for f in said["findings"]
            if f["status"] != "not_measured"
        ]
        rest = ", ".join(f["code"] for f in said["findings"][:4])
        at = next((k + 1 for k, code in enumerate(alarms(said)) if code in said["accepts"]), None)
        text = ("; ".join(shown[:3]) or f"nothing, verdict {said.get('verdict')}: {rest}") + (
            f" (right one at {at})" if at else ""
        )
    return f"| {said['case']} | {wanted} | {text} |".replace("\n", " ")


def report(
    told: Sequence[Result],
    trained: Sequence[Result] = (),
    others: Mapping[str, Alarms] | None = None,
    *,
    listed: Collection[str] = ("tune",),
) -> str:
    """Return the scores as Markdown; misses by name of those halves that may be `listed`."""
    pairs = paired(told)
    alone = [said for said in told if not said["case"].startswith("pair/")]
    faults, healthy = [s for s in alone if s["accepts"]], [s for s in alone if not s["accepts"]]
    missed = [s for s in faults if s["half"] in listed and not FAULT_SCORES["first"](s)]
    disturbed = [s for s in healthy if s["half"] in listed and not HEALTHY_SCORES["plain ok"](s)]
    changed = [f"- {s['case']}: {' '.join(alarms(s)) or 'nothing'}; without: {' '.join(s['twin']) or 'nothing'}" for s in pairs if s["half"] in listed and not s["same"]]  # fmt: skip
    worse = [
        f"- {f['case']}: {', '.join(f['changed'])}" for f in trained if f["half"] in listed and f["result"] == "worse"
    ]
    head = "| case | wanted | said |\n| --- | --- | --- |\n"
    parts = [
        ("Faults", faults, lambda: table(_groups(faults, "area"), FAULT_SCORES)),
        ("Healthy trainings", healthy, lambda: table(_groups(healthy), HEALTHY_SCORES)),
        ("Adopted configs, trained again over five fresh seeds in plain PyTorch", trained, lambda: table(_groups(trained), RETRAINED_SCORES)),
        ("Other tools on the same cases: any alarm", others, lambda: beside(told, others or {})),
        ("Changes that must change nothing", pairs, lambda: table(_groups(pairs), PAIR_SCORES)),
        ("How often each code warned", alone, lambda: by_code(told)),
        ("Faults whose name does not stand first", missed, lambda: head + "\n".join(map(_line, missed))),
        ("Controls that are not plain ok", disturbed, lambda: head + "\n".join(map(_line, disturbed))),
        ("Pairs that differ", changed, lambda: "\n".join(changed)),
        ("Adopted and worse", worse, lambda: "\n".join(worse)),
    ]  # fmt: skip
    cost = sum(said["cpu_s"] for said in told) / max(len(told), 1)
    text = [f"## {title}\n\n{make()}" for title, there, make in parts if there]
    return "\n\n".join([*text, f"{len(told)} cases, {cost:.1f} s of processor time each."])


def confusion(told: Sequence[Result], path: Path) -> None:
    """Draw which area stood first (across) for faults of each area (down); healthy is a diagonal where all is right."""
    import matplotlib.pyplot as plt
    import numpy as np

    faults = [said for said in told if not said["case"].startswith("pair/")]
    pairs = Counter((said["area"], _first_area(said)) for said in faults)
    rows = sorted({row for row, _ in pairs})
    columns = [*rows, *sorted({column for _, column in pairs} - set(rows))]
    counts = np.array([[pairs[row, column] for column in columns] for row in rows], float)
    fig, ax = plt.subplots(figsize=(9, 6), layout="constrained")
    ax.imshow(counts / counts.sum(1, keepdims=True), cmap="Blues", vmin=0, vmax=1)
    for (i, j), count in np.ndenumerate(counts):
        if count:
            ax.text(j, i, f"{count:.0f}", ha="center", va="center", color="white" if count > counts[i].sum() / 2 else "black")  # fmt: skip
    ax.set_xticks(range(len(columns)), columns, rotation=60, ha="right")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xlabel("area of what stood first")
    ax.set_ylabel("area of the planted fault")
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _first_area(said: Result) -> str:
    first = alarms(said)[:1]
    if said.get("crash"):
        return "crash"
    if not first:
        return "healthy"
    if first[0] in said["accepts"]:
        return str(said["area"])
    names = {"clipping": "clip", "optimizers": "optimizer", "warmup": "schedule", "units": "init", "gradients": "init", "architecture": "stability"}  # fmt: skip
    stem = first[0].split(".")[0]
    return names.get(stem, stem)


def write(
    told: Sequence[Result],
    trained: Sequence[Result],
    root: Path,
    others: Mapping[str, Alarms] | None = None,
    *,
    planned: int = 0,
) -> None:
    """Write `docs/zoo.md`, its picture, and the README's table between its markers."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    )
    alone = [said for said in told if not said["case"].startswith("pair/")]
    faults, healthy = [s for s in alone if s["accepts"]], [s for s in alone if not s["accepts"]]
    said = f"{datetime.date.today()}, commit {commit.stdout.strip()}, {len(faults)} planted faults and {len(healthy)} healthy trainings"
    said += f" ({len(told)} of {planned} cases ran, in random order)" if len(told) < planned else ""
    text = (
        f"# How often the workbench is right\n\nMeasured by `make zoo` on {said}; `tests/zoo/` holds them all. The half named tune was "
        "looked at while verdicts were mended, the half named scored was not. First: the finding printed first names the fault. "
        f"Plain ok: no finding but ok.\n\n{report(told, trained, others)}\n\n"
        "![Area of the fault against area of what stood first](images/zoo.png)\n"
    )
    (root / "docs" / "zoo.md").write_text(text)
    confusion(told, root / "docs" / "images" / "zoo.png")
    scored = (
        ("scored half", [s for s in faults if s["half"] == "scored"]),
        ("scored half", [s for s in healthy if s["half"] == "scored"]),
    )
    small = (
        table([scored[0]], {name: FAULT_SCORES[name] for name in ("detected", "first", "top three")}).replace("cases", "faults", 1)
        + "\n\n" + table([scored[1]], {name: HEALTHY_SCORES[name] for name in ("fail", "any alarm", "plain ok")}).replace("cases", "healthy", 1)
    )  # fmt: skip
    readme = (root / "README.md").read_text()
    before, _, rest = readme.partition(START)
    if rest:
        (root / "README.md").write_text(f"{before}{START}\n{said}:\n\n{small}\n{END}{rest.partition(END)[2]}")
