"""`diagnose_hosts`: is this training right on many hosts (P7)? One verdict a code, and one for each of five areas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.findings.audited import Audited
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.hosts.diagnose_area import CLAUSE, host_finding, named
from workbench.topics.hosts.diagnose_buffers import buffers
from workbench.topics.hosts.diagnose_clip import clip
from workbench.topics.hosts.diagnose_data import data_seed, set_epoch, sharding
from workbench.topics.hosts.diagnose_evaluation import evaluation
from workbench.topics.hosts.diagnose_files import checkpoint_writers, writers
from workbench.topics.hosts.diagnose_update import init_seed, not_wrapped, straggler

__all__ = ["diagnose_hosts"]


def diagnose_hosts(
    record: Audited,
    *,
    straggler_ratio: float = 1.5,
    straggler_share: float = 0.75,
    min_steps: int = 16,
    content_share: float = 0.02,
    large_shift: float = 1.0,
) -> Diagnosis:
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
    ranks: Sequence[Mapping[str, Any]] = facts.get("ranks") or ()
    reason = _nothing_to_judge(facts, ranks)
    if reason is not None:
        findings = [_unseen(name, f"Not measured: {reason}", ranks) for name in CLAUSE]
    else:
        merged = buffers(ranks, large_shift=large_shift)
        judged = {
            "init_seed": init_seed(ranks),
            "data_seed": data_seed(ranks),
            "set_epoch": set_epoch(ranks),
            "sharding": sharding(ranks, content_share=content_share),
            "writers": writers(ranks, facts.get("printed") or {}),
            "checkpoint_writers": checkpoint_writers(ranks),
            "evaluation": evaluation(ranks, merged=merged.status == "ok"),
            "buffers": merged,
            "clip": clip(ranks),
            "straggler": straggler(
                ranks, ratio=straggler_ratio, share=straggler_share, min_steps=min_steps, cores=_cores(ranks)
            ),
            "not_wrapped": not_wrapped(ranks),
        }
        findings = [judged[name] for name in CLAUSE]
    return Diagnosis.of(record, tuple(findings))


def _cores(ranks: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the processors of the one machine on which all ranks ran; None where there were several."""
    return int(ranks[0]["cores"]) if len({r["host"] for r in ranks}) == 1 and ranks[0]["cores"] else None


def _nothing_to_judge(facts: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why hosts cannot be compared; None where they can."""
    if not facts:
        return "nobody looked at the hosts; `workbench hosts` and `audit_hosts` do."
    asked = int(facts.get("hosts") or max((r["world"] for r in ranks), default=0))
    here = {int(r["rank"]) for r in ranks}
    if ranks and not any(r["initialised"] for r in ranks):
        if any(r.get("spawned") for r in ranks):
            return "the script starts its processes itself; call audit_hosts() in the function that each of them runs."
        return "init_process_group was never called, so the processes know nothing of each other."
    if asked > len(here):
        missing = set(range(asked)) - here
        return f"{named(missing)} wrote no facts."
    if len(here) < 2:
        return "there is one host only, and nothing to compare it with."
    return None


def _unseen(name: str, reason: str, ranks: Sequence[Mapping[str, Any]]) -> Finding:
    if name == "not_wrapped" and len(ranks) > 1 and not any(r["initialised"] for r in ranks):
        return not_wrapped(ranks)
    return host_finding(name, "not_measured", reason)
