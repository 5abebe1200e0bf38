"""`diagnose_hosts`: is this training right on many ranks (P7)? One verdict a code, and one for each of five areas."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import partial, reduce
from operator import and_
from typing import Any

import numpy as np

from workbench.findings.audited import Audited
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding, Status, worst
from workbench.topics.batch_norm.replicas import SAME, largest_distance
from workbench.topics.hosts.diagnose_data import data_seed, evaluation, set_epoch, sharding
from workbench.topics.hosts.diagnose_update import CODES, Ranks, clip, init_seed, named, not_wrapped, straggler

AREAS = {
    "logging": ("writers",),
    "evaluation": ("evaluation", "buffers"),
    "RNG": ("init_seed", "data_seed", "set_epoch"),
    "checkpointing": ("checkpoint_writers", "buffers"),
    "sharding": ("sharding",),
}
"""The five places where training on many ranks goes wrong (P7.1); clipping, stragglers and wrapping concern the update itself."""


def diagnose_hosts(
    record: Audited, *, straggler_ratio: float = 1.5, straggler_share: float = 0.75, min_steps: int = 16,
    content_share: float = 0.02, large_shift: float = 1.0,
) -> Diagnosis:  # fmt: skip
    """Judge what was seen on every rank of a training.

    Args:
        record: a study of `HostsStudy`, or what `audit_hosts` and `audit_script` return; its facts hold "hosts".
        straggler_ratio: busy time of a rank over the others' in the same step, from which it makes them wait (rule of thumb).
        straggler_share: of the steps in which it has to do so: slow in most of them, not in some (rule of thumb).
        min_steps: timed steps below which no rank is called slow (rule of thumb).
        content_share: of examples that may be alike on two ranks where only their contents can be compared: data repeat
            themselves (rule of thumb).
        large_shift: of batch norm's running statistics between ranks, in standard deviations of the channel, from which harm
            is taken for granted: a channel moves by as much as it varies (rule of thumb).

    Returns:
        `hosts.init_seed`, `.data_seed`, `.set_epoch`, `.sharding`, `.writers`, `.checkpoint_writers`, `.evaluation`, `.buffers`,
        `.clip`, `.straggler`, `.not_wrapped`, once each; `host_areas` makes the five verdicts of P7.1 of them.
    """
    facts = record.facts.get("hosts") or {}
    ranks: Ranks = facts.get("ranks") or ()
    reason = _nothing_to_judge(facts, ranks)
    if reason is not None:
        alone = len(ranks) > 1 and not any(r["initialised"] for r in ranks)
        unseen = [CODES.not_measured(code, reason) for code in CODES]
        return Diagnosis.of(record, [*unseen[:-1], not_wrapped(ranks)] if alone else unseen)
    merged = buffers(ranks, large_shift=large_shift)
    one_machine = len({r["host"] for r in ranks}) == 1 and ranks[0]["cores"]
    cores = int(ranks[0]["cores"]) if one_machine else None
    findings = (
        init_seed(ranks), data_seed(ranks), set_epoch(ranks), sharding(ranks, content_share=content_share),
        writers(ranks, facts.get("printed") or {}), _written("hosts.checkpoint_writers", ranks, "checkpoint", "checkpoint"),
        evaluation(ranks, merged=merged.status == "ok"), merged, clip(ranks),
        straggler(ranks, ratio=straggler_ratio, share=straggler_share, min_steps=min_steps, cores=cores), not_wrapped(ranks),
    )  # fmt: skip
    return Diagnosis.of(record, findings)


def host_areas(diagnosis: Diagnosis) -> dict[str, Status]:
    """Return one verdict for each of logging, evaluation, RNG, checkpointing and sharding (P7.1).

    Statistics of batch norm that were not merged count for the evaluation where one saw them, else for the checkpoint.
    """
    found = {area: [diagnosis[f"hosts.{name}"] for name in names] for area, names in AREAS.items()}
    return {
        area: worst([f.status for f in of if f.code != "hosts.buffers" or f.evidence.get("area", "evaluation") == area])
        for area, of in found.items()
    }


def _nothing_to_judge(facts: Mapping[str, Any], ranks: Ranks) -> str | None:
    """Return why ranks cannot be compared; None where they can."""
    if not facts:
        return "the ranks were not observed; `workbench hosts` and `wb.hosts.audit` do that"
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
    return "there is one rank only, and nothing to compare it with" if len(here) < 2 else None


def buffers(ranks: Ranks, *, large_shift: float) -> Finding:
    """Judge whether running statistics were merged before each evaluation and each checkpoint (P7.3)."""
    code, moments = "hosts.buffers", ("evaluation", "checkpoint")
    if not any(r["buffers"] for r in ranks):
        if any(r["calls"]["wrapped"] + r["calls"]["other"] + r["calls"]["raw"] for r in ranks):
            return CODES.finding(code, "ok", "The model keeps no running statistics.")
        return CODES.not_measured(code, "no model was called in training")
    events = sorted({(row["step"], row["moment"]) for r in ranks for row in r["buffers"] if row["moment"] in moments})
    if not events:
        return CODES.not_measured(code, "nobody evaluated or saved the model")
    apart = [(moment, step, shift) for step, moment in events if (shift := _shift(ranks, step, moment)) is not None]
    largest, seen = max((shift for *_, shift in apart), default=0.0), {moment for moment, *_ in apart}
    broadcast = sorted({bool(w.get("broadcast_buffers")) for r in ranks for w in r["wrappers"]})
    evidence = {
        "area": "evaluation" if not apart or "evaluation" in seen else "checkpointing", "moments": len(events),
        "apart": [{"moment": m, "step": s, "shift": x} for m, s, x in apart[:50]], "broadcast_buffers": broadcast,
    }  # fmt: skip
    unit = "standard deviations"
    say = partial(CODES.finding, code, value=largest, unit=unit, threshold=large_shift, evidence=evidence)
    if not apart:
        said = f"Batch norm's running statistics are the same on all ranks at all {len(events)} evaluations and checkpoints."
        return say("ok", said)
    what = " and ".join(f"{moment}s" for moment in sorted(seen, reverse=True))
    wins = " DistributedDataParallel copies those of rank 0 over all others." if True in broadcast else ""
    said = f"Batch norm's running statistics differ between ranks at {len(apart)} of {len(events)} {what}, by up to {largest:.2g} standard deviations of a channel.{wins}"
    advice = (
        "Merge the running statistics of all ranks before each evaluation and each checkpoint: wb.batch_norm.merge_running_statistics(model).",
        "Or train with synchronised batch norm, or with a norm that keeps no statistics.",
    )
    return say("fail" if largest > large_shift else "warn", said, step=apart[0][1], advice=advice)


def _shift(ranks: Ranks, step: int, moment: str) -> float | None:
    """Return how far statistics of two ranks are apart, in standard deviations of the channel; None where they are the same but for rounding."""
    rows = []
    for rank in ranks:
        here = [row for row in rank["buffers"] if row["step"] == step]
        own = [row for row in here if row["moment"] == moment]
        rows += (own or [row for row in here if row["moment"] in ("training", "end")])[:1]
    if len({row["hash"] for row in rows}) < 2:
        return None
    if any("means" not in row for row in rows):
        return float("nan")
    means, variances = (np.array([row[name] for row in rows], dtype=np.float64) for name in ("means", "variances"))
    found = largest_distance(means, variances, of=variances.mean(axis=0))
    return None if found <= SAME else found


_NUMBERS = re.compile(r"(\D*)(\d+)")
_COUNTED = re.compile(r"(version|run|exp|experiment|trial|try|attempt)[-_ ]?$", re.IGNORECASE)
"""Words before a number that a program counts up by itself: the second process to come gets 1, whichever it is."""
_REPEATED = 3  # lines alike on all ranks from which they are a log (rule of thumb)


def writers(ranks: Ranks, printed: Mapping[str, Sequence[str]]) -> Finding:
    """Judge the files other than checkpoints, and what the ranks print (P7.2)."""
    found = _written("hosts.writers", ranks, "log", "log or other file")
    if found.status != "ok" or len(printed) < 2:
        return found
    alike = [Counter(re.sub(r"\d+", "#", line) for line in lines if line.strip()) for lines in printed.values()]
    common = reduce(and_, alike)
    repeated = {line: n for line, n in common.items() if n >= _REPEATED and not re.search(r"\brank\b", line, re.I)}
    if not repeated:
        return found
    line = max(repeated, key=lambda text: repeated[text])
    said = f"All {len(printed)} ranks print the same lines, {sum(repeated.values())} each, such as {line[:60]!r}."
    return CODES.finding(
        "hosts.writers", "warn", said, value=float(len(printed)), unit="ranks", threshold=1,
        evidence={**found.evidence, "printed": repeated}, advice=("Print on one rank only.",),
    )  # fmt: skip


def _written(code: str, ranks: Ranks, kind: str, word: str) -> Finding:
    """Judge the files of one kind; parts of a sharded checkpoint come from all ranks by design."""
    sharded = kind == "checkpoint" and any(w.get("sharded") for r in ranks for w in r["wrappers"])
    paths: dict[str, set[int]] = {}
    forms: dict[str, set[int]] = {}
    numbers: dict[str, set[tuple[int, tuple[int, ...]]]] = {}  # in each path of a form, beside the rank that writes it
    for rank in () if sharded else ranks:
        for path in (f["path"] for f in rank["files"] if f["kind"] == kind and not f["path"].endswith(".distcp")):
            form, number = re.sub(r"\d+", "#", path), rank["rank"]
            paths.setdefault(path, set()).add(number)
            forms.setdefault(form, set()).add(number)
            places = tuple(int(digits) for before, digits in _NUMBERS.findall(path) if not _COUNTED.search(before))
            numbers.setdefault(form, set()).add((number, places))

    def by_rank(form: str) -> bool:
        """Tell whether one of the numbers in each path is the rank: that is deliberate, a time or an id is not."""
        least = min(len(places) for _, places in numbers[form])
        return any(all(places[k] == rank for rank, places in numbers[form]) for k in range(least))

    own = [form for form, who in forms.items() if kind == "log" and len(who) > 1 and by_rank(form)]
    most = max((len(who) for form, who in forms.items() if form not in own), default=int(bool(own)))
    evidence = {"files": {path: sorted(who) for path, who in list(paths.items())[:50]}}
    say = partial(CODES.finding, code, value=float(most), unit="ranks", threshold=1, evidence=evidence)
    advice = ("Write on one rank only: if torch.distributed.get_rank() == 0.",)

    def who_writes(form: str, writers: Set[int]) -> tuple[str, str]:
        return named(writers).capitalize(), "/".join(form.split("/")[-2:])

    same = [path for path, who in paths.items() if len(who) > 1]
    alike = [form for form, who in forms.items() if len(who) > 1 and form not in own]
    if same:
        who, what = who_writes(same[0], paths[same[0]])
        return say(
            "fail", f"{who} write the same {word}, {what}: they overwrite or interleave each other.", advice=advice
        )
    if alike:
        who, what = who_writes(alike[0], forms[alike[0]])
        return say("warn", f"{who} write a {word} each, {what}.", advice=advice)
    if own:
        who, what = who_writes(own[0], forms[own[0]])
        return say("ok", f"{who} write a {word} each, named by the rank, {what}.")
    writing = sorted({rank for found in paths.values() for rank in found})
    return say(
        "ok", f"Each {word} is written by one rank ({named(writing)})." if writing else f"No rank writes a {word}."
    )
