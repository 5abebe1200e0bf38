"""Findings about how far one run came: whether its learning rate or its weight decay is far off, and whether a simple model does better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from workbench.curves.judged import JudgedStudy
from workbench.curves.minimised import without_loss
from workbench.curves.pace import PACE, blown, unslowed
from workbench.curves.trial_curves import RecordLike, TrialCurve
from workbench.findings.audited import Audit
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.topics.evaluation.diagnose_generalisation import diagnose_underfit
from workbench.topics.lr_sweep.own_lr import OWN_LR_CODES
from workbench.topics.optimizers.constants import CODES as OPTIMIZER_CODES
from workbench.topics.warmup.diagnose import CODES as WARMUP_CODES

_OTHERS = "wb.diagnose_function and workbench diagnose -- python train.py do so."


def own_settings(study: JudgedStudy, chance: float | None, *, broken: float = 0.25, least: int = 50) -> Iterable[Finding]:  # fmt: skip
    """Return `lr.too_high`, `lr.too_low`, `optimizers.weight_decay_shrinks` and `warmup.over_cap`, as far as one run tells.

    One that was cut short, or made fewer updates than `least`, tells nothing. Too high a learning rate is a failure where no
    more than the share `broken` is learned (rules of thumb).
    """
    loop = study.facts.get("loop") or {}
    curve = next((c for c in study.curves if c.finished), None) if loop.get("ended", True) else None
    updates = 0 if curve is None else int(np.isfinite(curve.loss).sum())
    if curve is None or updates < least:
        reason = (
            "the loop was left before its end"
            if curve is None
            else f"this asks for {least} updates, and {updates} were made"
        )
        for codes, code in ((OWN_LR_CODES, "lr.too_high"), (OWN_LR_CODES, "lr.too_low"), (OPTIMIZER_CODES, "optimizers.weight_decay_shrinks"), (WARMUP_CODES, "warmup.over_cap")):  # fmt: skip
            yield codes.finding(code, "ok", f"Does not apply: {reason}.")
        return
    high, low = blown(curve, chance), unslowed(curve, chance)
    groups = [g for o in (loop.get("parameters") or {}).get("optimizers", {}).values() for g in o["groups"]]
    alike = len({(g["lr"], g["weight_decay"]) for g in groups if g["vectors"] < g["parameters"]}) < 2
    decay = outweighed(curve, chance) if alike else None  # norms are those of all groups, lr and decay those of one
    lr = study.config.get("peak_lr")
    name = f"The learning rate of {lr:.4g}" if isinstance(lr, float) and math.isfinite(lr) else "The learning rate"
    say = partial(OWN_LR_CODES.finding, "lr.too_high")
    if high is None:
        yield say(
            "ok",
            "The loss does not rise far above that of the untrained model while the parameters grow to many times their size.",
        )
    else:
        yield say(
            "fail" if high["learned"] <= broken else "warn", f"{name} is too high: about update {high['update']:,} the loss was {high['rise']:.3g} times that of the untrained model, {high['start']:.4g}, and the parameters grew to {high['growth']:.3g} times their first norm. "
            f"{max(high['learned'], 0.0):.0%} of the way to 0 is learned at the end.", value=high["rise"], unit="of the first loss", step=high["update"], evidence=high,
            advice=[f"Try learning rates 3, 10 and 30 times smaller, and a warmup; {_OTHERS}"],
        )  # fmt: skip
    say = partial(OWN_LR_CODES.finding, "lr.too_low")
    if low is None:
        yield say("ok", "The loss slows down before the run ends, or more than half of it is learned.")
    else:
        yield say(
            "warn", f"{name} is too low, or {len(curve.loss):,} updates are too few: the training loss falls as fast at the end as at the start, from {low['start']:.4g} in the first quarter to {low['end']:.4g} in the last, "
            f"{max(low['learned'], 0.0):.0%} of the way from a constant output's loss to 0.", value=low["pace"], unit="of the first pace", threshold=PACE, evidence=low,
            advice=[f"Try learning rates 3, 10 and 30 times as large; {_OTHERS}"],
        )  # fmt: skip

    say = partial(OPTIMIZER_CODES.finding, "optimizers.weight_decay_shrinks")
    if decay is None:
        yield say(
            "ok",
            "Weight decay undoes no updates; what a smaller one costs takes other runs."
            if study.config.get("weight_decay")
            else "Does not apply: the optimizer has no weight decay.",
        )
    else:
        yield say(
            "warn", f"Weight decay {decay['weight_decay']:g} outweighs the updates: in the later half of the looks it alone would shorten the parameters by {decay['pull']:.3g} times as much as an update moves them, and the parameters end at "
            f"{decay['norm']:.2g} times their first norm. {max(decay['learned'], 0.0):.0%} of the way to a loss of 0 is learned.", value=decay["pull"], unit="times an update", threshold=1.0, evidence=decay,
            advice=[f"Try a weight decay 100 and 1,000 times smaller, and none; what each costs takes other runs: {_OTHERS}"],
        )  # fmt: skip

    yield _warmup(curve)


def _warmup(curve: TrialCurve, *, least: int = 150, rise: float = 1.25, most: float = 4.5) -> Finding:
    """Judge whether the learning rate still rises as the run ends: it never falls, and is `rise` to `most` times that of the middle of `least` updates or more (rules of thumb).

    A line and a cosine end at 2 and 4 times their middle at most, a search for the largest learning rate at more. One that slows down is no warmup.
    """
    say = partial(WARMUP_CODES.finding, "warmup.over_cap")
    lr = curve.column("lr")
    lr = lr[np.isfinite(lr)]
    middle = lr[lr.size // 2] if lr.size else 0.0
    slows = lr.size and lr[-1] - middle < 0.9 * (middle - lr[0])
    if lr.size < least or (np.diff(lr) < 0).any() or slows or not rise * middle < lr[-1] <= most * middle:
        return say("ok", "The learning rate does not rise until the run ends.")
    return say(
        "warn", f"The learning rate still rises at the last of {lr.size:,} updates, to {lr[-1]:.4g}: the run ends within its warmup.", value=1.0, unit="share of the updates", threshold=0.1,
        advice=["Take a tenth of the updates at most for the warmup, and look whether its length is in the unit, updates or epochs, in which the scheduler is stepped."],
    )  # fmt: skip


def outweighed(curve: TrialCurve, chance: float | None, *, pull: float = 1.0, moves: float = 1e-3, learned: float = 0.85) -> dict[str, float] | None:  # fmt: skip
    """Return "pull", "weight_decay", "norm" and "learned" of a run whose weight decay alone would move the parameters further than its updates do; else None.

    Gradients undo then what the decay does. Of a rule that scales the decay by its second moment nothing is said.

    Args:
        curve: the run.
        chance: loss of the best constant output; None takes the first loss, and so does one that begins above it.
        pull: length of the decay's part of an update over that of the update, the median over the later half of the looks (by definition).
        moves: share of the norm of the parameters that an update moves them by; a run that moves them less has arrived where both balance (rule of thumb).
        learned: share of the way from that loss to 0 from which on nothing is said (rule of thumb).
    """
    config, losses = curve.config, curve.loss[np.isfinite(curve.loss)]
    rule, decay = config.get("optimizer"), config.get("weight_decay")
    reach = {"adamw": 1.0, "sgd": 1.0, "momentum": 1 / max(1 - float(config.get("momentum") or 0.0), 1e-6)}.get(
        str(rule)
    )
    update, norm, lr = (curve.column(name) for name in ("update_norm", "param_norm", "lr"))
    rows = np.flatnonzero(np.isfinite(update) & np.isfinite(norm) & (norm > 0) & (update > 0))
    late = rows[len(rows) // 2 :]
    if not decay or reach is None or late.size < 2 or losses.size < 10:
        return None
    ratio = update[late] / norm[late]
    found, left = float(np.median(lr[late] * decay * reach / ratio)), float(np.median(losses[-(losses.size // 10) :]))
    share = 1 - left / max(float(losses[0]), chance or 0.0)
    if not (found >= pull and np.median(ratio) >= moves and share < learned):
        return None
    return {"pull": found, "weight_decay": decay, "norm": float(norm[rows[-1]] / norm[rows[0]]), "learned": share}


def underfits(record: RecordLike, *, least: int = 150) -> Diagnosis:
    """Hold the accuracy of the later half of a run, or the one logged last, against that of simple models on its first examples; of fewer updates than `least` nothing is said (rule of thumb)."""
    loop = record.facts.get("loop") or {}
    data, rows, evals = loop.get("data") or {}, loop.get("recall") or (), record.evals
    total = sum(row["total"] for row in rows)
    model: dict[str, Any] = {"score": None}
    drifts = ((data.get("shift") or {}).get("validation") or {}).get("drifts")
    single = (data.get("trained") or {}).get("alone") and not drifts and not without_loss(record)
    if total and single and loop["ended"] and loop["updates"] >= least:
        scores = evals["value"][evals["metric"].str.contains("acc")].tolist() if "metric" in evals else []
        last = [value / 100 if value > 1 else value for value in scores[-1:]]
        score = max([sum(row["correct"] for row in rows) / total, *filter(math.isfinite, last)])
        model = {"score": score, "classes": len(rows), "examples": total}
    facts = {"generalisation": {name: {"train": model} for name in ("last", "selected")}, "data": {"yardsticks": data.get("yardsticks") or {}}}  # fmt: skip
    return diagnose_underfit(Audit(facts=facts, workload=record.workload, command=record.command, path=record.path))
