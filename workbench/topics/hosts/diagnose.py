"""`diagnose_hosts`: is this training right on many hosts (P7)? One verdict a code, and one for each of five areas."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from workbench.findings.audited import Audited
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding, Status, worst
from workbench.topics.hosts.diagnose_data import data_seed, evaluation, set_epoch, sharding
from workbench.topics.hosts.diagnose_update import clip, init_seed, not_wrapped, straggler
from workbench.topics.hosts.ranks import CODES, Ranks, named

AREAS = {
    "logging": ("writers",),
    "evaluation": ("evaluation", "buffers"),
    "RNG": ("init_seed", "data_seed", "set_epoch"),
    "checkpointing": ("checkpoint_writers", "buffers"),
    "sharding": ("sharding",),
}
"""The five places where training on many hosts goes wrong (P7.1); clipping, stragglers and wrapping concern the update itself."""


def diagnose_hosts(
    record: Audited, *, straggler_ratio: float = 1.5, straggler_share: float = 0.75, min_steps: int = 16,
    content_share: float = 0.02, large_shift: float = 1.0,
) -> Diagnosis:  # fmt: skip
    """Judge what was seen on every rank of a training on many hosts.

    Args:
        record: a study of `HostsStudy`, or what `audit_hosts` and `audit_script` return; its facts hold "hosts".
        straggler_ratio: busy time of a host over the others' in the same step, from which it makes them wait (rule of thumb).
        straggler_share: of the steps in which it has to do so: slow in most of them, not in some (rule of thumb).
        min_steps: timed steps below which no host is called slow (rule of thumb).
        content_share: of examples that may be alike on two hosts where only their contents can be compared: data repeat
            themselves (rule of thumb).
        large_shift: of batch norm's running statistics between hosts, in standard deviations of the channel, from which harm
            is taken for granted: a channel moves by as much as it varies (rule of thumb).

    Returns:
        `hosts.init_seed`, `.data_seed`, `.set_epoch`, `.sharding`, `.writers`, `.checkpoint_writers`, `.evaluation`, `.buffers`,
        `.clip`, `.straggler`, `.not_wrapped`, once each; `host_areas` makes the five verdicts of P7.1 of them.
    """
    facts = record.facts.get("hosts") or {}
    ranks: Ranks = facts.get("ranks") or ()
    reason = _nothing_to_judge(facts, ranks)
    findings: Sequence[Finding]
    if reason is not None:
        alone = len(ranks) > 1 and not any(r["initialised"] for r in ranks)
        unseen = [CODES.not_measured(code, reason) for code in CODES]
        findings = [*unseen[:-1], not_wrapped(ranks)] if alone else unseen
    else:
        merged = buffers(ranks, large_shift=large_shift)
        one_machine = len({r["host"] for r in ranks}) == 1 and ranks[0]["cores"]
        cores = int(ranks[0]["cores"]) if one_machine else None
        findings = (
            init_seed(ranks),
            data_seed(ranks),
            set_epoch(ranks),
            sharding(ranks, content_share=content_share),
            writers(ranks, facts.get("printed") or {}),
            checkpoint_writers(ranks),
            evaluation(ranks, merged=merged.status == "ok"),
            merged,
            clip(ranks),
            straggler(ranks, ratio=straggler_ratio, share=straggler_share, min_steps=min_steps, cores=cores),
            not_wrapped(ranks),
        )
    return Diagnosis.of(record, tuple(findings))


def host_areas(diagnosis: Diagnosis) -> dict[str, Status]:
    """Return one verdict for each of logging, evaluation, RNG, checkpointing and sharding (P7.1).

    Statistics of batch norm that were not merged count for the evaluation where one saw them, else for the checkpoint.
    """
    found: dict[str, Status] = {}
    for area, names in AREAS.items():
        findings = {name: diagnosis[f"hosts.{name}"] for name in names}
        found[area] = worst([
            finding.status for name, finding in findings.items()
            if name != "buffers" or finding.evidence.get("area", "evaluation") == area
        ])  # fmt: skip
    return found


def _nothing_to_judge(facts: Mapping[str, Any], ranks: Ranks) -> str | None:
    """Return why ranks cannot be compared; None where they can."""
    if not facts:
        return "nobody looked at the hosts; `workbench hosts` and `wb.hosts.audit` do"
    asked = int(facts.get("hosts") or max((r["world"] for r in ranks), default=0))
    here = {int(r["rank"]) for r in ranks}
    if ranks and not any(r["initialised"] for r in ranks):
        if any(r.get("spawned") for r in ranks):
            return (
                "the script starts its processes itself; call wb.hosts.audit() in the function that each of them runs"
            )
        return "init_process_group was never called, so the processes know nothing of each other"
    if asked > len(here):
        return f"{named(set(range(asked)) - here)} wrote no facts"
    return "there is one host only, and nothing to compare it with" if len(here) < 2 else None


_SAME = 1e-6
"""Standard deviations of a channel up to which statistics are the same: rounding in another order."""


def buffers(ranks: Ranks, *, large_shift: float) -> Finding:
    """Judge whether running statistics were merged before each evaluation and each checkpoint (P7.3)."""
    code = "hosts.buffers"
    if not any(r["buffers"] for r in ranks):
        if any(r["calls"]["wrapped"] + r["calls"]["other"] + r["calls"]["raw"] for r in ranks):
            return CODES.finding(code, "ok", "The model keeps no running statistics.")
        return CODES.not_measured(code, "no model was called in training")
    moments = ("evaluation", "checkpoint")
    events = sorted({(row["step"], row["moment"]) for r in ranks for row in r["buffers"] if row["moment"] in moments})
    if not events:
        return CODES.not_measured(code, "nobody evaluated or saved the model")
    apart = [(moment, step, shift) for step, moment in events if (shift := _shift(ranks, step, moment)) is not None]
    largest = max((shift for _, _, shift in apart), default=0.0)
    area = "evaluation" if not apart or any(moment == "evaluation" for moment, _, _ in apart) else "checkpointing"
    broadcast = sorted({bool(w.get("broadcast_buffers")) for r in ranks for w in r["wrappers"]})
    evidence: dict[str, Any] = {
        "area": area, "moments": len(events), "apart": [{"moment": m, "step": s, "shift": x} for m, s, x in apart[:50]],
        "broadcast_buffers": broadcast,
    }  # fmt: skip
    numbers: dict[str, Any] = {
        "value": largest, "unit": "standard deviations", "threshold": large_shift, "evidence": evidence,
    }  # fmt: skip
    if not apart:
        said = f"Batch norm's running statistics are the same on all hosts at all {len(events)} evaluations and checkpoints."
        return CODES.finding(code, "ok", said, **numbers)
    what = " and ".join(sorted({"evaluations" if m == "evaluation" else "checkpoints" for m, _, _ in apart}))
    wins = " DistributedDataParallel copies those of rank 0 over all others." if True in broadcast else ""
    return CODES.finding(
        code, "fail" if largest > large_shift else "warn",
        f"Batch norm's running statistics differ between hosts at {len(apart)} of {len(events)} {what}, by up to {largest:.2g} standard deviations of a channel.{wins}",
        step=apart[0][1],
        advice=(
            "Merge the running statistics of all hosts before each evaluation and each checkpoint: wb.batch_norm.merge_running_statistics(model).",
            "Or train with synchronised batch norm, or with a norm that keeps no statistics.",
        ),
        **numbers,
    )  # fmt: skip


def _shift(ranks: Ranks, step: int, moment: str) -> float | None:
    """Return how far statistics of two hosts are apart, in standard deviations of the channel; None where they are the same."""
    rows = [row for r in ranks if (row := _at(r["buffers"], step, moment)) is not None]
    if len({row["hash"] for row in rows}) < 2:
        return None
    if any("means" not in row for row in rows):
        return float("nan")
    means = np.array([row["means"] for row in rows], dtype=np.float64)
    variances = np.array([row["variances"] for row in rows], dtype=np.float64)
    if not (np.isfinite(means).all() and np.isfinite(variances).all()):
        return float("nan")
    deviation = np.sqrt(np.maximum(variances.mean(axis=0), 1e-30))
    of_means = np.ptp(means, axis=0) / deviation
    of_deviations = np.ptp(np.sqrt(np.maximum(variances, 0)), axis=0) / deviation
    found = float(max(of_means.max(initial=0.0), of_deviations.max(initial=0.0)))
    return found if found > _SAME else None


def _at(rows: Sequence[Mapping[str, Any]], step: int, moment: str) -> Mapping[str, Any] | None:
    """Return the statistics at a moment, or, of a host that did nothing then, those with which it went on."""
    own = [row for row in rows if row["step"] == step and row["moment"] == moment]
    later = [row for row in rows if row["step"] == step and row["moment"] in ("training", "end")]
    return next(iter(own + later), None)


_NUMBERS = re.compile(r"(\D*)(\d+)")
_COUNTED = re.compile(r"(version|run|exp|experiment|trial|try|attempt)[-_ ]?$", re.IGNORECASE)
"""Words before a number that a program counts up by itself: the second host to come gets 1, whoever it is."""


_REPEATED = 3
"""Lines alike on all hosts from which they are a log (rule of thumb)."""


def writers(ranks: Ranks, printed: Mapping[str, Sequence[str]]) -> Finding:
    """Judge the files other than checkpoints, and what the ranks print (P7.2)."""
    found = _written("hosts.writers", ranks, "log", "log or other file")
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
    return CODES.finding(
        "hosts.writers", "warn", f"All {len(printed)} hosts print the same lines, {sum(repeated.values())} each, such as {line[:60]!r}.",
        value=float(len(printed)), unit="hosts", threshold=1, evidence={**found.evidence, "printed": repeated},
        advice=("Print on one host only.",),
    )  # fmt: skip


def checkpoint_writers(ranks: Ranks) -> Finding:
    """Judge the checkpoints; parts of a sharded one come from all ranks by design."""
    return _written("hosts.checkpoint_writers", ranks, "checkpoint", "checkpoint")


def _written(code: str, ranks: Ranks, kind: str, word: str) -> Finding:
    sharded = kind == "checkpoint" and any(w.get("sharded") for r in ranks for w in r["wrappers"])
    by_path: dict[str, set[int]] = {}
    by_form: dict[str, set[tuple[int, tuple[int, ...]]]] = {}
    for rank in ranks:
        for path in (file["path"] for file in rank["files"] if file["kind"] == kind and not sharded):
            if not path.endswith(".distcp"):
                by_path.setdefault(path, set()).add(rank["rank"])
                places = tuple(int(digits) for before, digits in _NUMBERS.findall(path) if not _COUNTED.search(before))
                by_form.setdefault(re.sub(r"\d+", "#", path), set()).add((rank["rank"], places))
    forms = {form: {rank for rank, _ in found} for form, found in by_form.items()}
    own = [form for form, found in by_form.items() if kind == "log" and len(forms[form]) > 1 and _by_rank(found)]
    most = max((len(found) for form, found in forms.items() if form not in own), default=int(bool(own)))
    evidence = {"files": {path: sorted(found) for path, found in list(by_path.items())[:50]}}
    numbers: dict[str, Any] = {"value": float(most), "unit": "hosts", "threshold": 1, "evidence": evidence}
    advice = ("Write on one host only: if torch.distributed.get_rank() == 0.",)
    same = [path for path, found in by_path.items() if len(found) > 1]
    alike = [form for form, found in forms.items() if len(found) > 1 and form not in own]
    if same:
        said = f"write the same {word}, {_short(same[0])}: they overwrite or interleave each other."
        return CODES.finding(code, "fail", f"{named(by_path[same[0]]).capitalize()} {said}", advice=advice, **numbers)
    if alike:
        said = f"{named(forms[alike[0]]).capitalize()} write a {word} each, {_short(alike[0])}."
        return CODES.finding(code, "warn", said, advice=advice, **numbers)
    if own:
        said = f"{named(forms[own[0]]).capitalize()} write a {word} each, named by the rank, {_short(own[0])}."
        return CODES.finding(code, "ok", said, **numbers)
    who = sorted({rank for found in by_path.values() for rank in found})
    said = f"Each {word} is written by one host ({named(who)})." if who else f"No host writes a {word}."
    return CODES.finding(code, "ok", said, **numbers)


def _by_rank(found: Set[tuple[int, tuple[int, ...]]]) -> bool:
    """Tell whether one of the numbers in each file's path is the rank that writes it: that is deliberate, a time or an id is not."""
    places = min(len(numbers) for _, numbers in found)
    return any(all(numbers[place] == rank for rank, numbers in found) for place in range(places))


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])
