"""`checkpoints.resume_jump`: does training go on from a checkpoint as if it had never stopped (P4.2)?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.diagnostics.base import Finding

__all__ = ["resume_finding"]

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
