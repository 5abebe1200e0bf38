"""`answers`: the questions that every training is asked, each answered in a sentence or two; what a reader sees first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.findings.causes import causes_first, is_remark, to_mend_first, vetoes_tuning
from workbench.findings.finding import Finding, Status, p_words, worst

_ALARMS = ("fail", "warn")
_TUNED = ("lr.", "stability.")
_FIX_FIRST = "Not decided: fix "


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a diagnosis answers to one question.

    Attributes:
        question: in one to three words.
        status: the worst of the findings that it rests on.
        text: for a person.
        codes: findings whose own sentences it holds.
    """

    question: str
    status: Status
    text: str
    codes: tuple[str, ...] = ()


def answers(findings: Sequence[Finding], recommendation: Mapping[str, Any] | None) -> tuple[Answer, ...]:
    """Return the answers about learning rate, stability, faults and config; none where a study asked for less than all of them.

    Args:
        findings: of a whole diagnosis.
        recommendation: what `recommend` returns; None where no config was sought.
    """
    if recommendation is None or not any(f.code == "lr.best" for f in findings):
        return ()
    findings = causes_first(findings)
    alarms = [f for f in findings if f.status in _ALARMS and not f.follows_from]
    config = _config(findings, recommendation)
    rate = _learning_rate(findings, alarms, config)
    if config.text.startswith(_FIX_FIRST) and rate.status == "ok":  # what is compared with a fault decides nothing
        rate = replace(rate, status="not_measured", text=f"{config.text} {rate.text}")
    return (rate, _stability(findings, alarms), _broken(findings, alarms), config)


def _of(findings: Sequence[Finding], prefix: str) -> list[Finding]:
    return [f for f in findings if f.code.startswith(prefix)]


def _told(question: str, found: Sequence[Finding]) -> Answer:
    """Return an answer in the words of findings, what several of them say alike once."""
    text = " ".join(dict.fromkeys(f.summary for f in found))
    return Answer(question=question, status=worst([f.status for f in found]), text=text, codes=tuple(f.code for f in found))  # fmt: skip


def _learning_rate(findings: Sequence[Finding], alarms: Sequence[Finding], config: Answer) -> Answer:
    """The first alarm about the learning rate, else where it is lowest and how far the own one is; and from where on it is too high."""
    lead = [*_of(alarms, "lr."), *_of(findings, "lr.best")][:1]
    own, low, high = (lead[0].evidence.get(name) for name in ("baseline_lr", "low", "high"))
    if lead[0].code == "lr.best" and own is not None and low is not None and high is not None:
        far = "lr.too_low" if own < low else "lr.too_high"
        lead += [f for f in _of(findings, far) if not low <= own <= high and not f.follows_from]
    edge = [f for f in _of(findings, "lr.unstable") if f.value is not None or "short_upper" in f.evidence]
    told = _told("Learning rate", [*lead, *edge])
    if len(lead) > 1 and config.text.startswith("Keep"):
        told = replace(told, text=f"Keep {own:.4g}. {told.text}")
    beyond = [f for f in _of(findings, "lr.grid_edge") if f.status == "not_measured" and lead[0].status == "ok"]
    ends = {"low": ("below", "lowest_lr"), "high": ("above", "highest_lr")}
    open_ended = [f for f in _of(findings, "lr.grid_edge") if f.status != "warn" and lead[0].status == "ok"]
    sides = [(f, *ends[f.evidence["border"]]) for f in open_ended if f.evidence.get("border")]
    text = " ".join([told.text, *(f"None {word} {f.evidence[end]:.4g} was compared." for f, word, end in sides)])
    return replace(told, text=text, status=worst([told.status, *(f.status for f in beyond)]), codes=(*told.codes, *(f.code for f in beyond)))  # fmt: skip


def _stability(findings: Sequence[Finding], alarms: Sequence[Finding]) -> Answer:
    """The first alarm, the alarm that it follows from, or how far the edge is."""
    question, wrong = "Stability", _of(alarms, "stability.")
    if wrong:
        return _told(question, wrong[:1])
    later = [f for f in _of(findings, "stability.") if f.status in _ALARMS]
    if later:
        return Answer(question=question, status=worst([f.status for f in later]), text=f"Unstable; that follows from {later[0].follows_from}.")  # fmt: skip
    headroom = [f for f in _of(findings, "stability.headroom") if f.status != "not_measured"]
    looked = [f for f in _of(findings, "stability.") if not f.code.endswith(("headroom", "_logits"))]
    if any(f.status == "ok" for f in looked):
        told = [*filter(came_back, looked), *headroom]
        text = " ".join(["Your config trains stably.", *(f.summary for f in told)])
        codes = tuple(f.code for f in told)
        return Answer(question=question, status=worst([f.status for f in looked]), text=text, codes=codes)
    return _told(question, looked[:1] or _of(findings, "stability.headroom"))


def came_back(finding: Finding) -> bool:
    """Whether a run of the own config shows a rise of its loss that costs nothing: no alarm, but who saw it wants to read of it."""
    hits = finding.evidence.get("hits", ()) if finding.status == "ok" and finding.code.startswith("stability.") else ()
    return any(hit.get("zone") == "own" for hit in hits)


def _broken(findings: Sequence[Finding], alarms: Sequence[Finding]) -> Answer:
    """The first fault in data, loop, loss, model, schedule or evaluation, and how many others there are; else what is good to know."""
    question = "Anything broken"
    mine = [f for f in alarms if not f.code.startswith(_TUNED)]
    harmful = {f.follows_from for f in findings if f.status == "fail"}
    wrong = [f for f in mine if f.status == "fail" or f.code in harmful or not is_remark(f.code)]
    if wrong:
        more = f" {len(wrong) - 1} more: {', '.join(f.code for f in wrong[1:])}." if wrong[1:] else ""
        lead = wrong[0]
        return Answer(
            question=question, status=lead.status, text=f"{lead.code}: {lead.summary}{more}", codes=(lead.code,)
        )
    looked = [f for f in findings if not f.code.startswith(_TUNED)]
    well, missing = ([f for f in looked if f.status == status] for status in ("ok", "not_measured"))
    void = sum(not f.applies for f in well)
    later = [f for f in looked if f.status in _ALARMS and f.follows_from]
    made = len(well) - void
    rest = f"; {void} more {'does' if void == 1 else 'do'} not apply" if void else ""
    told = [f"Nothing found in {made} check{'' if made == 1 else 's'}{rest}."]
    told += [f"{len(missing)} could not be made."] if missing else []
    told += [f"Good to know: {', '.join(f.code for f in mine)}."] if mine else []
    told += [f"{', '.join(f.code for f in later)}: follows from {later[0].follows_from}."] if later else []
    status: Status = "not_measured" if missing else "ok"
    return Answer(question=question, status=status, text=" ".join(told))


def _config(findings: Sequence[Finding], found: Mapping[str, Any]) -> Answer:
    """What to change and what that brings, or why to keep everything."""
    names = [str(name) for name in found.get("changed", ())] if found.get("adopted") else []
    # who compares by rows that were trained on has decided nothing
    faults = vetoes_tuning(findings) or [f.code for f in findings if f.code == "data.leakage" and f.status == "fail"]
    if found.get("first"):
        return Answer(question="Config", status="not_measured", text=f"Not decided: {found['first']}.")
    if names:
        before, after = found.get("own") or {}, found.get("config") or {}
        changes = "; ".join(f"{name} {_change(before.get(name), after.get(name))}" for name in names)
        text = f"{f'Change {changes}' if found.get('proof') else f'Try {changes}, not proven'}{_gain(found)}."
    elif faults:
        text = f"{_FIX_FIRST}{to_mend_first(findings, faults)} first."
        return Answer(question="Config", status="not_measured", text=text)
    elif is_unproved(found):
        text = f"Not proved: {found['candidate']} looks better; it is not trained under fresh seeds yet."
        return Answer(question="Config", status="not_measured", text=text)
    elif found.get("candidate"):
        text = f"Keep yours: {found['candidate']} was not proven better."
    else:
        why = str(found.get("reason") or "").removeprefix("Not adopted: ")
        text = f"Keep yours: {why[:1].lower() + why[1:]}" if why else "Keep yours."
        if any(f.status == "not_measured" for f in findings if f.code in ("lr.best", "lr.grid_edge")):
            return Answer(question="Config", status="not_measured", text=text)
    if names and faults:
        text = f"First fix {to_mend_first(findings, faults)}. Then: {text[:1].lower()}{text[1:]}"
    return Answer(question="Config", status="not_measured" if names and not found.get("proof") else "ok", text=text)


def is_unproved(found: Mapping[str, Any]) -> bool:
    """Whether a recommendation has a candidate that looks better and that nothing speaks against but the lack of a proof."""
    return bool(found.get("candidate") and found.get("promising")) and not (
        found.get("adopted") or found.get("proof") or found.get("refuted")
    )


def _change(before: Any, after: Any) -> str:
    return f"to {_shown(after)}" if before is None and after is not None else f"{_shown(before)} → {_shown(after)}"


def _shown(value: Any) -> str:
    return "off" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)


def _gain(found: Mapping[str, Any]) -> str:
    """Return baseline and candidate by the metric that selects checkpoints, and the chance that they are equal."""
    proof = found.get("proof") or {}
    select = str(proof.get("select") or (found.get("config") or {}).get("select") or "")
    before, after = (found.get(arm) or {} for arm in ("baseline", "recommended"))
    if select not in before or select not in after:
        return ""
    chances = [float(arm["chance"]) for arm in proof.get("arms", ()) if arm.get("chance") is not None]
    made, planned = len(proof.get("seeds", ())), proof.get("planned") or 0
    of = f"{made} fresh seeds{f' of {planned} planned' if made < planned else ''}"
    by = f" ({proof['test']})" if "test" in proof else ""
    sure = f", {p_words(max(chances))}{by} over {of}" if chances else ", one seed"
    at, later = "", ""
    if end := found.get("at_end"):
        first, last = (f"{step:,}" for step in end["best_steps"])
        at = f" at step {first if first == last else f'{first} to {last}'} of {end['steps']:,}"
        later = f". It is {end['last']:.4g} at the end: keep the best checkpoint, or train fewer steps"
    return f": {select} {before[select]:.4g} → {after[select]:.4g}{at}{sure}{later}"
