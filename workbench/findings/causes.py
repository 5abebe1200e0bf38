"""`causes_first`: the one order of findings, causes before what follows from them (F1.1).

An alarm early in the chain data -> loop -> loss -> model -> schedule -> learning rate explains alarms further down: inputs of
size 10,000 make the loss at initialisation large, the best learning rate small and training unstable. Mending the last of these
mends nothing, so it is listed under the first and gives no advice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from workbench.findings.finding import MEASUREMENTS, STATUSES, Finding

_PLACES = (
    "data.nonfinite", "data.labels", "data.no_signal", "data.leakage", "data.duplicates", "data.unshuffled",
    "data.weak_shuffle", "data.label_shift", "data.train_validation_shift", "data.scale", "data.worker_rng", "data.*",
    "loop.no_step", "loop.zeroed_before_step", "loop.optimizer_mismatch", "loop.sees_target", "loop.no_grad_mode", "loop.no_gradient", "loop.unowned_parameters", "loop.no_update", "loop.frozen_random",
    "loop.no_zero_grad", "loop.batch_dependence", "loop.eval_mode_in_training", "loop.train_mode_in_eval", "loop.*", "evaluation.nondeterministic",
    "loss.broadcast", "loss.double_softmax", "loss.output_range", "loss.unbounded", "loss.*",
    "init.constant_output", "init.loss", "init.*",
    "units.equal", "units.dropped", "units.dead", "units.saturated", "units.*",
    "gradients.vanishing", "gradients.exploding", "gradients.*",
    "input.unused_features", "loop.overfit_one_batch",
    "schedule.collapse", "schedule.discontinuity", "schedule.restarts", "schedule.*", "warmup.over_cap",
    "clipping.before_unscale", "clipping.after_step", "clipping.aggressive", "clipping.*",
    "optimizers.*",
    "batch_norm.*",
    "lr.nothing_learns", "lr.too_high",
    "stability.divergent", "stability.early", "stability.mid", "stability.spike", "stability.early_recovers", "stability.*",
    "lr.too_low", "lr.at_edge", "lr.*", "warmup.*",
    "hosts.*", "ps.*",
    "evaluation.underfits", "evaluation.generalisation_gap", "evaluation.weighting", "evaluation.coverage",
    "checkpoints.selection", "evaluation.bad_proxy", "evaluation.skew", "evaluation.*",
    "checkpoints.*", "data.imbalance", "batch_size.*", "architecture.*", "input.*",
)  # fmt: skip
"""Where a code stands among others of its severity; `prefix.*` is the place of what is not named itself."""

REMARKS = (
    "architecture.*", "stability.headroom", "lr.grid_edge", "checkpoints.best_not_last", "checkpoints.selection", "data.imbalance",
    "evaluation.too_small", "evaluation.minority_counts", "evaluation.interval", "evaluation.batch_size", "clipping.cures",
    "batch_size.*", "input.bound", "loop.retained_graph", "loop.conversion", "loop.restores_nothing",
)  # fmt: skip
"""Good to know, and no reason why training would fail: they stand after every other alarm of their severity, in this order."""

_LOST = (
    "checkpoints.best_not_last", "checkpoints.selection", "evaluation.generalisation_gap", "evaluation.periodic",
    "evaluation.underfits", "clipping.cures", "clipping.nonfinite",
)  # fmt: skip
"""What a training that goes badly shows, whatever the reason."""
_VALIDATED = ("checkpoints.best_not_last", "checkpoints.selection", "evaluation.generalisation_gap", "batch_norm.stale")
_LEARNS = (
    "lr.*", "stability.*", "warmup.*", "loop.overfit_one_batch", "clipping.aggressive", "clipping.masks_lr", *_LOST,
)  # fmt: skip
"""How training goes: what anything wrong with the data, the loop, the loss or the model changes."""
_START = ("init.*", "units.*", "gradients.*", *_LEARNS)
_TUNED = ("stability.*", "lr.at_edge", "lr.grid_edge", "lr.probabilistic", "lr.too_low")
_DRIVEN = (
    "lr.too_low",
    "lr.nothing_learns",
    "lr.grid_edge",
    "lr.at_edge",
    "loop.overfit_one_batch",
    "evaluation.underfits",
)

_EXPLAINS: dict[str, tuple[str, ...]] = {
    "data.nonfinite": ("loss.*", "loop.*", "batch_norm.*", "data.scale", *_START),
    "data.labels": ("data.label_shift", "data.imbalance", "loss.*", *_START),
    "data.no_signal": ("data.duplicates", *_LEARNS),
    "data.leakage": ("data.duplicates", "checkpoints.selection"),
    "data.unshuffled": ("data.weak_shuffle", "batch_norm.*", *_LEARNS),
    "data.weak_shuffle": _LEARNS,
    "data.label_shift": ("data.train_validation_shift", *_VALIDATED),
    "data.train_validation_shift": _VALIDATED,
    "data.scale": ("data.no_signal", "loss.output_range", *_START),
    "data.worker_rng": ("loop.repeated_batch",),
    "loop.no_step": ("loop.optimizer_mismatch", "loop.no_grad_mode", "loop.no_gradient", "loop.unowned_parameters", "loop.memory_creep", *_LEARNS),
    "loop.zeroed_before_step": ("loop.optimizer_mismatch", "loop.no_gradient", "loop.no_update", "gradients.*", *_LEARNS),
    "loop.optimizer_mismatch": ("loop.no_gradient", "loop.unowned_parameters", "loop.no_update", "gradients.*", *_LEARNS),
    "loop.no_grad_mode": ("loop.no_gradient", "loop.unowned_parameters", "input.unused_features", "gradients.*", *_LEARNS),
    "loop.no_gradient": ("loop.unowned_parameters", "input.unused_features", "gradients.*", *_LEARNS),
    "loop.unowned_parameters": ("loop.no_update", *_LEARNS),
    "loop.overfit_one_batch": ("lr.nothing_learns",),
    "loop.batch_dependence": ("evaluation.weighting", "evaluation.coverage", *_LEARNS),
    "loop.train_mode_in_eval": ("evaluation.nondeterministic", "evaluation.weighting", "evaluation.coverage", *_LEARNS),
    "loop.scheduler_unit": ("schedule.*", *_LEARNS),
    "loop.scheduler_order": ("schedule.*",),
    "loop.retained_graph": ("loop.memory_creep",),
    "loop.memory_creep": (),
    "loop.conversion": (),
    "loop.*": _LEARNS,
    "loss.floor": (),
    "loss.double_softmax": ("init.loss", "loss.metric_disagrees", "gradients.*", *_LEARNS),
    "loss.*": ("init.loss", "loop.no_gradient", "loop.no_update", "loss.metric_disagrees", "units.*", "gradients.*", *_LEARNS),
    "init.*": _LEARNS,
    "units.dropped": ("loop.no_gradient", "loop.no_update", *_LEARNS),
    "units.dead": (
        "loop.no_gradient", "loop.no_update", "init.constant_output", "input.unused_features", "gradients.vanishing", *_LEARNS,
    ),
    "units.*": (
        "loop.no_gradient", "init.constant_output", "input.unused_features", "gradients.vanishing", *_LEARNS,
    ),
    "gradients.vanishing": ("init.constant_output", *_LEARNS),
    "gradients.*": _LEARNS,
    "architecture.no_residual": ("lr.nothing_learns", "stability.headroom", "evaluation.underfits"),
    "architecture.no_norm": ("lr.nothing_learns", "stability.headroom"),
    "architecture.norm_after_add": ("stability.headroom", "stability.early_recovers"),
    "architecture.branch_not_zero": ("stability.headroom", "stability.early_recovers"),
    "schedule.collapse": (*_DRIVEN, "warmup.over_cap"),
    "schedule.*": ("stability.*", "lr.at_edge", "lr.too_high", "evaluation.periodic"),
    "warmup.over_cap": _DRIVEN,
    "clipping.aggressive": (*_DRIVEN, *_LOST),
    "clipping.before_unscale": ("clipping.aggressive", "clipping.masks_lr", *_LEARNS),
    "clipping.after_step": ("clipping.aggressive", "clipping.masks_lr", *_LEARNS),
    "optimizers.stale_second_moment": _LEARNS,
    "batch_norm.small_batch": _LEARNS,
    "optimizers.constants": (*_LEARNS, "clipping.*"),
    "optimizers.weight_decay_shrinks": (*_LEARNS, "clipping.*"),
    "batch_norm.*": ("evaluation.nondeterministic", *_LOST),
    "lr.nothing_learns": (*_TUNED, *_LOST),
    "lr.too_high": ("lr.nothing_learns", "clipping.aggressive", "clipping.masks_lr", "batch_norm.stale", "batch_norm.cold_ema", *_TUNED, *_LOST),
    "stability.divergent": ("stability.*", "lr.too_low", *_LOST),
    "stability.early": ("stability.early_recovers", "stability.headroom", "lr.too_low", *_LOST),
    "stability.mid": ("stability.spike", "stability.early_recovers", "stability.headroom", "lr.too_low", *_LOST),
    "lr.too_low": ("lr.grid_edge", "evaluation.underfits"),
    "evaluation.underfits": ("evaluation.generalisation_gap", "checkpoints.best_not_last"),
    "evaluation.generalisation_gap": ("checkpoints.best_not_last",),
    "evaluation.batch_size": ("evaluation.generalisation_gap", "checkpoints.best_not_last"),
}  # fmt: skip
"""Code -> alarms that follow from it; `prefix.*` holds for the codes of a prefix that have no entry."""

STRUCTURAL = frozenset(cause for cause, explained in _EXPLAINS.items() if "lr.*" in explained) | {"schedule.collapse"}
"""Codes whose alarm makes every comparison of hyperparameters void: mend it, then tune (F1.1)."""

_ALARMS = ("fail", "warn")
STANDS_ALONE = "stands_alone"
"""Name in the evidence of an alarm that follows from no other, and explains what no other does, though its code might."""


def causes_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings in the order in which to read them, each alarm that follows from another with `follows_from` set.

    Alarms first: what stands for itself by severity and then along the chain from data to checkpoints, remarks after the rest of
    their severity; then what follows from these, without advice; then measurements, what was not measured, and what is well, each in
    the order given.
    """
    found = list(findings)
    places = [*_PLACES, ""]
    alarms = {f.code: places.index(_key(f.code, _PLACES)) for f in found if f.status in _ALARMS}
    alone = {f.code for f in found if f.evidence.get(STANDS_ALONE)}
    roots = {f.code: _root(f.code, alarms, alone) for f in found if f.code in alarms}

    def key(finding: Finding) -> tuple[int, ...]:
        status = STATUSES.index(finding.status)
        if finding.code not in roots:
            measures = finding.status == "ok" and finding.code in MEASUREMENTS
            return (2, not measures, status)
        remark = REMARKS.index(_key(finding.code, REMARKS)) + 1 if is_remark(finding.code) else 0
        return (1, roots[finding.code] != finding.code, status, remark, alarms[finding.code])

    def marked(finding: Finding) -> Finding:
        root = roots.get(finding.code, finding.code)
        if root == finding.code:
            return replace(finding, follows_from=None) if finding.follows_from else finding
        return replace(finding, follows_from=root, advice=())

    return tuple(marked(f) for f in sorted(found, key=key))


def listed(findings: Iterable[Finding]) -> list[tuple[Finding, list[Finding]]]:
    """Return each finding that stands for itself, in the order to read them, with those that follow from it."""
    ranked = causes_first(findings)
    return [(f, [g for g in ranked if g.follows_from == f.code]) for f in ranked if not f.follows_from]


def and_more(findings: Iterable[Finding]) -> str:
    """Return "; 7 more follow from these", the end of a count of what stands for itself; "" where all does."""
    folded = sum(f.follows_from is not None for f in causes_first(findings))
    return f"; {folded} more {'follow' if folded > 1 else 'follows'} from these" if folded else ""


def is_remark(code: str) -> bool:
    """Tell whether an alarm of this code is good to know, and no reason why training would fail."""
    return _is(code, REMARKS)


def vetoes_tuning(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Return the alarms that have to be mended before any hyperparameter is compared, the first to mend first."""
    wrong = [f for f in causes_first(findings) if f.status in _ALARMS and _key(f.code, STRUCTURAL)]
    return tuple(f.code for f in wrong if f.status == "fail" or _key(f.code, _EXPLAINS) in STRUCTURAL)


def to_mend_first(findings: Iterable[Finding], among: Collection[str]) -> str:
    """Return those of the codes that follow from no other of them, the first to mend first: "a", "a and b", "a, b and c"."""
    *others, last = (f.code for f in causes_first(findings) if f.code in among and f.follows_from not in among)
    return f"{', '.join(others)} and {last}" if others else last


def _root(code: str, alarms: dict[str, int], alone: Collection[str]) -> str:
    """Return the alarm that this one follows from, through any others between, or the code itself."""
    seen = {code}
    while causes := [c for c in alarms if c not in seen and _is(code, _EXPLAINS.get(_key(c, _EXPLAINS), ()))]:
        if code in alone:
            break
        code = min(causes, key=lambda c: (c in alone, alarms[c]))
        seen.add(code)
    return code


def _key(code: str, patterns: Iterable[str]) -> str:
    """Return the pattern that holds for a code: its own name before `prefix.*`, "" where there is none."""
    known = set(patterns)
    return next((p for p in (code, f"{code.partition('.')[0]}.*") if p in known), "")


def _is(code: str, patterns: Iterable[str]) -> bool:
    return bool(_key(code, patterns))
