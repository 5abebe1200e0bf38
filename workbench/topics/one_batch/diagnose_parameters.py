"""`diagnose_parameters`: parameters that stay as chance made them: frozen, or never given to the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.curves.trials import RecordLike
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis, Finding

__all__ = ["diagnose_parameters"]

CODES = ("loop.frozen_random", "loop.unowned_parameters")


def diagnose_parameters(record: RecordLike, *, small_frac: float = 0.05) -> Diagnosis:
    """Say whether parameters that are not trained hold anything but their random initialisation.

    Loaded weights are frozen for good reasons; random ones are features that nobody chose.

    Args:
        record: a study whose facts hold "parameters".
        small_frac: frozen random parameters up to this share of all are taken for a design, such as random features or fixed
            positions (rule of thumb).

    Returns:
        `loop.frozen_random` and `loop.unowned_parameters`, once each.
    """
    facts = record.facts.get("parameters")
    if not facts:
        reason = why_missing(record.facts, "parameters", "nobody looked at the parameters that are not trained")
        findings = tuple(Finding(code=code, status="not_measured", clause="F1.1", summary=reason) for code in CODES)
    else:
        total = max(int(facts["numbers"]), 1)
        findings = (_frozen(facts["frozen"], total, small_frac), _unowned(facts["unowned"], facts["outside"], total))
    return Diagnosis.of(record, findings)


def _frozen(rows: Sequence[Mapping[str, Any]], total: int, small: float) -> Finding:
    random, share = _random([row for row in rows if not row.get("waves")], total)
    common: dict[str, Any] = {
        "code": "loop.frozen_random", "clause": "F1.1", "value": share, "unit": "share of all parameters", "threshold": small,
        "evidence": {"parameters": random},
    }  # fmt: skip
    if not random:
        told = (
            f"{len(rows)} parameter tensors are frozen, none at a random initialisation."
            if rows
            else "No parameter is frozen."
        )
        waves = _random(rows, total)[0]
        if waves:
            told = f"{_named(waves)}: frozen at random, and only a sine or cosine takes what they make, as in random Fourier features."
        return Finding(status="ok", summary=told, **common)
    said = f"{share:.0%} of the parameters are frozen at their random initialisation: {_named(random)}."
    if share <= small:
        return Finding(status="ok", summary=said, **common)
    return Finding(
        status="warn", summary=said, **common,
        advice=[
            "Load the weights that were to be kept (load_state_dict in build_model), or train them: requires_grad_(True).",
            "Where random features are meant, hold them as buffers (register_buffer), which say so.",
        ],
    )  # fmt: skip


def _unowned(rows: Sequence[Mapping[str, Any]], outside: Sequence[Mapping[str, Any]], total: int) -> Finding:
    """Judge what the optimizer cannot train: parameters that it was not given, first those that the model does not know."""
    random, share = _random(outside, total)
    if random:
        by_loss = all(row.get("by_loss") for row in outside if row["random"])
        return Finding(
            code="loop.unowned_parameters", clause="F1.1", status="warn", value=share, unit="share of all parameters",
            evidence={"parameters": [str(row["name"]) for row in outside], "random": random, "outside": True},
            summary=f"The {'loss' if by_loss else 'forward pass'} uses {_named(random)}, which model.parameters() does not hold: {share:.0%} of all parameters are never trained.",
            advice=[
                "Make what the loss trains a part of the model; freeze or load what it only measures with."
                if by_loss
                else "Keep layers in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList: a plain list or dict is not searched."
            ],
        )  # fmt: skip
    random, share = _random(rows, total)
    common: dict[str, Any] = {
        "code": "loop.unowned_parameters", "clause": "F1.1", "value": share, "unit": "share of all parameters",
        "evidence": {"parameters": [str(row["name"]) for row in rows], "random": random},
    }  # fmt: skip
    if not rows:
        return Finding(status="ok", summary="The optimizer has every parameter that is not frozen.", **common)
    named = _named([str(row["name"]) for row in rows])
    if not random:
        return Finding(
            status="ok", summary=f"The optimizer was not given {named}, which hold no random initialisation.", **common
        )
    return Finding(
        status="warn", **common,
        summary=f"The optimizer was not given {named}: they stay as they are initialised, {share:.0%} of all parameters at random.",
        advice=["Give the optimizer model.parameters(), or freeze by requires_grad_(False) what is not to be trained."],
    )  # fmt: skip


def _random(rows: Sequence[Mapping[str, Any]], total: int) -> tuple[list[str], float]:
    found = [row for row in rows if row["random"]]
    return [str(row["name"]) for row in found], sum(int(row["numbers"]) for row in found) / total


def _named(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
