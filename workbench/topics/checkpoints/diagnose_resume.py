"""`checkpoints.resume_jump`: does training go on from a checkpoint as if it had never stopped (P4.2)?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.findings.diagnosis import Finding

__all__ = ["checkpoint_finding", "resume_finding"]

CODE, CLAUSE = "checkpoints.resume_jump", "P4.2"
_ADVICE = {
    "parameters": "Save the model's state dict, and load it before the first step.",
    "buffers": "Save the whole state dict of the model, not its parameters alone: batch-norm statistics are buffers.",
    "random state": "Save and restore the random state of Python, NumPy and torch (torch.get_rng_state and the like).",
    "other": "Save {name}, where it has one by its state_dict, and load it after it was built.",
}


def resume_finding(facts: Mapping[str, Any] | None) -> Finding:
    """Judge what a resume audit measured.

    Args:
        facts: of `audit_resume` or `collect_resume`: steps, after, jump (largest difference of the losses), floor (the same of two runs
            that were not stopped), allowed (None: the same bits are asked for), changed, first_step, missing, outside, parts,
            losses, losses_resumed; None where nobody looked.
    """
    if not facts:
        why = "Not measured: no run was resumed here. wb.audit_resume does it with your own save and load."
        return Finding(code=CODE, status="not_measured", clause=CLAUSE, summary=why)
    allowed = facts["allowed"]
    known: dict[str, Any] = {
        "code": CODE, "clause": CLAUSE, "value": facts["jump"], "unit": "loss", "threshold": allowed or 0.0, "evidence": dict(facts),
    }  # fmt: skip
    if not facts["changed"] and allowed is not None:
        return Finding(
            status="not_measured", **known,
            summary=f"Not measured: two runs that were not stopped differ by {facts['floor']:.2g} already, and the resumed one lies "
            f"within {allowed:.2g} (ten times that): what is smaller cannot be seen.",
            advice=["Make training repeat itself (seeds, torch.use_deterministic_algorithms), and audit again."],
        )  # fmt: skip
    if not facts["changed"]:
        return Finding(
            status="ok", **known,
            summary=f"Resumed after {facts['steps']} steps, the next {facts['after']} are bit for bit those of the run that was not "
            "stopped.",
        )  # fmt: skip
    missing = list(facts["missing"])
    if missing:
        return Finding(
            status="fail", step=_step(facts), advice=[_advice(name) for name in missing], **known,
            summary=f"The checkpoint loses {', '.join(missing)}: {_jump(facts)}. Put back by hand, it vanishes.",
        )  # fmt: skip
    return Finding(
        status="warn", step=_step(facts), **known,
        summary=f"A resumed run is not the one that was not stopped: {_jump(facts)}. What is lost is none of the parts that could be put "
        "back by hand.",
        advice=[
            "Look for state outside of them: a dataset or an augmentation with random numbers of its own, counters in the model that "
            "are no buffers, worker processes that draw."
        ],
    )  # fmt: skip


def checkpoint_finding(facts: Mapping[str, Any]) -> Finding:
    """Judge what `audit_checkpoint` found of the parts of a training in a checkpoint.

    Args:
        facts: parts (part, missing, names of what is missing of it, where, other_values), random_state (whether it is there), draws
            (whether a model has dropout).
    """
    rows = list(facts["parts"])
    missing = [row["part"] for row in rows if row["missing"]]
    if facts["draws"] and not facts["random_state"]:
        missing.append("random state")
    there = [row for row in rows if not row["missing"]]
    other = [row["part"] for row in there if row["other_values"]]
    known: dict[str, Any] = {
        "code": CODE, "clause": CLAUSE, "value": float(len(missing)), "unit": "parts", "threshold": 0.0,
        "evidence": {**facts, "missing": missing, "other_values": other},
    }  # fmt: skip
    if missing:
        some = {row["part"]: row["names"] for row in rows if row["missing"] and row["where"] is not None}
        said = [f"{name} ({', '.join(some[name])})" if some.get(name) else name for name in missing]
        return Finding(
            status="fail", summary=f"The checkpoint does not hold {', '.join(said)}.", advice=[_advice(name) for name in missing], **known
        )  # fmt: skip
    if other and len(other) < len(there):
        return Finding(
            status="warn", **known,
            summary=f"The checkpoint holds other values of {', '.join(other)} than the objects have, though the rest is the same.",
            advice=["Save all parts at one moment, after the same update, from the objects that training uses."],
        )  # fmt: skip
    held = f"The checkpoint holds {', '.join(row['part'] for row in there)}"
    if not facts["random_state"]:
        return Finding(
            status="warn", advice=[_ADVICE["random state"]], **known,
            summary=f"{held}, but no random state: what is shuffled or drawn after a restart is something else.",
        )  # fmt: skip
    older = ", with other values than the objects have: it is of another moment" if other else ""
    return Finding(
        status="ok", **known,
        summary=f"{held} and random state{older}. Whether your code puts all of it back, and the place in the data, audit_resume tells.",
    )  # fmt: skip


def _step(facts: Mapping[str, Any]) -> int | None:
    first = facts["first_step"]
    return None if first is None else int(facts["steps"] + first)


def _jump(facts: Mapping[str, Any]) -> str:
    if "loss" in facts["changed"]:
        return f"from step {_step(facts)} on the loss differs by up to {facts['jump']:.2g}"
    return f"the losses agree, but {', '.join(facts['changed'])} end with other values"


def _advice(name: str) -> str:
    kind = next((k for k in ("parameters", "buffers", "random state") if name.endswith(k)), "other")
    return _ADVICE[kind].format(name=name)
