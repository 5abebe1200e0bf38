"""`hosts.writers`, `hosts.checkpoint_writers`: do logs and checkpoints come from one host (P7.2)?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from workbench.findings.diagnosis import Finding
from workbench.topics.hosts.diagnose_area import host_finding, named

__all__ = ["checkpoint_writers", "writers"]

Ranks = Sequence[Mapping[str, Any]]
_ADVICE = "Write on one host only: if torch.distributed.get_rank() == 0."
_NUMBERS = re.compile(r"(\D*)(\d+)")
_COUNTED = re.compile(r"(version|run|exp|experiment|trial|try|attempt)[-_ ]?$", re.IGNORECASE)
"""Words before a number that a program counts up by itself: the second host to come gets 1, whoever it is."""
_REPEATED = 3
"""Lines alike on all hosts from which they are a log (rule of thumb)."""


def writers(ranks: Ranks, printed: Mapping[str, Sequence[str]]) -> Finding:
    """Judge the files other than checkpoints, and what the hosts print."""
    found = _judged("writers", ranks, "log", "log or other file")
    if found.status != "ok" or len(printed) < 2:
        return found
    alike = [Counter(re.sub(r"\d+", "#", line) for line in lines if line.strip()) for lines in printed.values()]
    common = {line: min(count[line] for count in alike) for line in alike[0] if all(line in count for count in alike)}
    repeated = {
        line: count for line, count in common.items() if count >= _REPEATED and not re.search(r"\brank\b", line, re.I)
    }
    if not repeated:
        return found
    line = max(repeated, key=lambda text: repeated[text])
    evidence = {**found.evidence, "printed": repeated}
    return host_finding(
        "writers", "warn", f"All {len(printed)} hosts print the same lines, {sum(repeated.values())} each, such as {line[:60]!r}.",
        value=float(len(printed)), unit="hosts", threshold=1, evidence=evidence, advice=("Print on one host only.",),
    )  # fmt: skip


def checkpoint_writers(ranks: Ranks) -> Finding:
    """Judge the checkpoints; parts of a sharded one come from all hosts by design."""
    return _judged("checkpoint_writers", ranks, "checkpoint", "checkpoint")


def _judged(name: str, ranks: Ranks, kind: str, word: str) -> Finding:
    sharded = any(w.get("sharded") for r in ranks for w in r["wrappers"])
    by_path: dict[str, set[int]] = {}
    by_form: dict[str, set[tuple[int, tuple[int, ...]]]] = {}
    for rank in ranks:
        for file in rank["files"]:
            if file["kind"] == kind and not (sharded and kind == "checkpoint") and not file["path"].endswith(".distcp"):
                by_path.setdefault(file["path"], set()).add(rank["rank"])
                places = tuple(
                    int(digits) for word, digits in _NUMBERS.findall(file["path"]) if not _COUNTED.search(word)
                )
                by_form.setdefault(re.sub(r"\d+", "#", file["path"]), set()).add((rank["rank"], places))
    evidence = {"files": {path: sorted(found) for path, found in list(by_path.items())[:50]}}
    forms = {form: {rank for rank, _ in found} for form, found in by_form.items()}
    own = [form for form, found in by_form.items() if kind == "log" and len(forms[form]) > 1 and _by_rank(found)]
    most = max((len(found) for form, found in forms.items() if form not in own), default=int(bool(own)))
    numbers: dict[str, Any] = {"value": float(most), "unit": "hosts", "threshold": 1, "evidence": evidence}
    same = [path for path, found in by_path.items() if len(found) > 1]
    alike = [form for form, found in forms.items() if len(found) > 1 and form not in own]
    if same:
        path = same[0]
        return host_finding(
            name, "fail", f"{_upper(named(by_path[path]))} write the same {word}, {_short(path)}: they overwrite or interleave each other.",
            advice=(_ADVICE,), **numbers,
        )  # fmt: skip
    if alike:
        form = alike[0]
        return host_finding(
            name,
            "warn",
            f"{_upper(named(forms[form]))} write a {word} each, {_short(form)}.",
            advice=(_ADVICE,),
            **numbers,
        )
    if own:
        said = f"{_upper(named(forms[own[0]]))} write a {word} each, named by the rank, {_short(own[0])}."
        return host_finding(name, "ok", said, **numbers)
    who = sorted({rank for found in by_path.values() for rank in found})
    said = f"Each {word} is written by one host ({named(who)})." if who else f"No host writes a {word}."
    return host_finding(name, "ok", said, **numbers)


def _by_rank(found: Set[tuple[int, tuple[int, ...]]]) -> bool:
    """Tell whether one of the numbers in each file's path is the rank that writes it: that is deliberate, a time or an id is not."""
    places = min(len(numbers) for _, numbers in found)
    return any(all(numbers[place] == rank for rank, numbers in found) for place in range(places))


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])
