"""`diagnose_one_batch`: what one batch told before training: can it be fitted, and does the right thing reach the outputs?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.curves.losses import DEEP, bottomless
from workbench.curves.trials import RecordLike
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.one_batch.diagnose_layers import LAYER_CODES, layer_findings
from workbench.topics.one_batch.diagnose_loss import LOSS_CODES, loss_findings
from workbench.topics.one_batch.facts import Facts, finding, named, part, unmeasured

__all__ = ["diagnose_one_batch"]

_OWN = (
    "loop.train_mode_in_eval",
    "loop.eval_mode_in_training",
    "evaluation.nondeterministic",
    "loop.batch_dependence",
    "loop.sees_target",
    "input.unused_features",
    "init.constant_output",
)
FEWEST = 4
"""Trained parameters from which on a model can be asked to fit as many examples (rule of thumb)."""
CODES = (*_OWN, *LOSS_CODES, *LAYER_CODES, "loop.overfit_one_batch")


def diagnose_one_batch(
    record: RecordLike,
    *,
    least_progress: float = 0.01,
    coupled: float = 1e-3,
    constant: float = 1e-6,
    random: float = 1e-3,
    unused_columns: float = 0.1,
    unused_slices: float = 0.25,
    deep: float = DEEP,
    nothing: float = 1e-6,
) -> Diagnosis:
    """Judge the facts that were collected about one batch of training data and a fresh model.

    Args:
        record: a study whose facts hold "one_batch".
        least_progress: by which share of itself the loss has to depend on whose outputs are whose, or, where it cannot, to fall, at
            the best of all learning rates (rule of thumb: a model that ignores its inputs has 0).
        coupled: change of an example's outputs when the others are exchanged, over that when it is itself (rule of thumb:
            rounding gives 1e-6).
        constant: spread of the outputs between examples over their size, below which they are one (rule of thumb: as above).
        random: change of the outputs between two evaluations, over their spread (rule of thumb: as above).
        unused_columns: share of a table's columns that may go unread (rule of thumb).
        unused_slices: share of the channels, rows, columns or places of images and sequences that may (rule of thumb: strides
            and pools leave out a border).
        deep: a training loss that falls so many times as far below zero as it began above or below, and at least 1, and goes on
            falling, has no minimum (rule of thumb).
        nothing: share of the untrained model's loss that one and the same output for every example may not come below (rule of thumb).

    Returns:
        The codes of `CODES`, once each.
    """
    facts = record.facts.get("one_batch")
    if not facts:
        otherwise = "nobody looked at one batch; `workbench diagnose` does, before it trains"
        reason = why_missing(record.facts, "one_batch", otherwise)
        found = [Finding(code=code, status="not_measured", summary=reason) for code in CODES]
    else:
        fits = _fits(facts, least_progress)
        found = [
            *_modes(facts, random),
            _coupling(facts, coupled),
            _answer(facts),
            _unused(facts, unused_columns, unused_slices),
            _constant(facts, constant),
            *_by_runs(loss_findings(facts), record, deep, nothing),
            *layer_findings(facts, fits=fits.status != "fail"),
            fits,
        ]
    found = [replace(f, clause="F2.4" if f.code.startswith(("units", "gradients", "init")) else "F1.1") for f in found]
    return Diagnosis.of(record, tuple(found))


def _fits(facts: Facts, least: float) -> Finding:
    code, fit = "loop.overfit_one_batch", part(facts, "fit")
    if fit is None:
        return unmeasured(code, facts, "fit")
    if fit["parameters"] < FEWEST:
        said = f"Does not apply: {fit['parameters']} parameters cannot tell examples apart."
        return finding(code, "ok", said)
    runs = fit["runs"]
    progress = [run["progress"] for run in runs]
    best = max(range(len(runs)), key=lambda i: progress[i])
    evidence = {
        "lrs": [run["lr"] for run in runs],
        "optimizers": [run["optimizer"] for run in runs],
        "progress": progress,
        "first_loss": runs[0]["loss"][0],
        "last_losses": [run["loss"][-1] for run in runs],
        "examples": fit["examples"],
    }
    numbers: dict[str, Any] = {"value": progress[best], "unit": "share", "threshold": least, "evidence": evidence}
    if runs[0]["descent"] is not None and runs[0]["descent"] < 0:
        return finding(
            code, "fail", "The optimizer moves up the gradient: its first update makes the loss larger.", **numbers,
            advice=["Leave out maximize=True, or negate what the optimizer gets; a loss is minimised."],
        )  # fmt: skip
    if progress[best] >= least:
        run = runs[best]
        said = f"One batch can be fitted: {run['steps']} steps at lr {run['lr']:.3g} take its loss from {run['loss'][0]:.4g} to {run['loss'][-1]:.4g}."
        return finding(code, "ok", said, **numbers)
    if fit["cut_short"]:
        said = f"Not measured: {sum(run['steps'] for run in runs)} steps on one batch took too long to try other learning rates."
        return finding(code, "not_measured", said, evidence=evidence)
    if not abs(runs[0]["loss"][0] or 0.0) > 0:
        return finding(code, "ok", "Does not apply: the loss of the fresh model is 0.", evidence=evidence)
    lrs = [run["lr"] for run in runs]
    return finding(
        code, "fail",
        f"{fit['examples']} examples of one batch cannot be fitted at any of {len(runs)} learning rates from {min(lrs):.3g} to {max(lrs):.3g}: "
        "the outputs do not tell them apart.",
        **numbers,
        advice=[
            "Look for what keeps inputs, targets or gradients from the model: the findings beside this one name it where they can.",
            "Make the model fit these examples before anything else is tuned.",
        ],
    )  # fmt: skip


def _by_runs(findings: list[Finding], record: RecordLike, deep: float, nothing: float) -> list[Finding]:
    """Return the findings with `loss.unbounded` as a failure where the loss of a run has no end, or asks nothing of the inputs."""
    found, constant = bottomless(record, deep=deep), record.facts.get("chance_loss")
    first = ((record.facts.get("preflight") or {}).get("train") or {}).get("loss")
    if found is not None:
        lowest, lr, start = found
        said = Finding(
            code="loss.unbounded", status="fail", value=lowest, unit="loss",
            summary=f"The training loss falls from {start:.3g} to {lowest:.3g} at lr {lr:.3g}, and on: it has no minimum.",
            advice=("Look for a term that rewards ever larger or smaller outputs: logits where log-probabilities are asked for, the sign or the "
                    "exponential of a log variance, a missing square.",),
        )  # fmt: skip
    elif constant is not None and first is not None and 0 <= constant < nothing * first:
        said = Finding(
            code="loss.unbounded", status="fail", value=constant, unit="loss", threshold=nothing * first,
            summary=f"One and the same output for every example takes the loss from {first:.3g} to {constant:.3g}: it asks nothing of the inputs.",
            advice=("Look for a term that is missing, such as the logarithm of a variance that the error is divided by, and for targets that "
                    "are all the same.",),
        )  # fmt: skip
    else:
        return findings
    return [said if f.code == said.code and f.status != "fail" else f for f in findings]


def _coupling(facts: Facts, limit: float) -> Finding:
    code, found, modes = "loop.batch_dependence", part(facts, "coupling"), part(facts, "modes")
    if found is None:
        return unmeasured(code, facts, "coupling")
    ratio = found["ratio"]
    if ratio is None:
        return finding(code, "ok", "Does not apply: no outputs that differ from example to example.", evidence=found)
    numbers: dict[str, Any] = {"value": ratio, "unit": "ratio", "threshold": limit, "evidence": found}
    if ratio <= limit:
        return finding(code, "ok", "In evaluation the outputs of an example do not depend on the others.", **numbers)
    said = f"In evaluation the outputs of an example depend on the other examples of its batch ({ratio:.2g} times as much as on itself)"
    norms = [name for name, kind in (modes or {}).get("train_in_eval", {}).items() if kind == "batch_norm"]
    if norms:
        return finding(code, "ok", f"{said}, by batch norm that stays in training mode.", **numbers)
    if modes and modes["batch_statistics"]:
        return finding(
            code, "warn", f"{said}: {named(modes['batch_statistics'])} keeps no running statistics.", **numbers,
            advice=["Set track_running_stats=True, or take GroupNorm: otherwise a prediction depends on its batch."],
        )  # fmt: skip
    loss = part(facts, "loss")
    return finding(
        code, "warn" if loss is not None and loss["kind"] is None else "fail", f"{said}.", **numbers,
        advice=[
            "Look for a view or reshape that mixes the batch axis with another, and for a mean, softmax or norm over axis 0.",
            "Set batch_first=True where nn.RNN, LSTM, GRU, MultiheadAttention or Transformer get (batch, length, width).",
        ],
    )  # fmt: skip


def _answer(facts: Facts) -> Finding:
    code = "loop.sees_target"
    if isinstance(facts.get("answer"), dict) and "reason" in facts["answer"]:
        return unmeasured(code, facts, "answer")
    found = facts.get("answer")
    if not found:
        return finding(code, "ok", "Does not apply: the targets are no tokens of the inputs.")
    numbers: dict[str, Any] = {"value": found["agree"], "unit": "share", "evidence": dict(found)}
    if not found["sees"]:
        return finding(
            code, "ok", "The output of a position does not depend on the token that it has to predict.", **numbers
        )
    if found["offset"]:
        return finding(
            code, "fail", "The output of a position depends on later tokens, and the next one is its target: the model is shown the answer.", **numbers,
            advice=["Mask later positions in attention (is_causal=True, or a causal mask), and read sequences in one direction alone."],
        )  # fmt: skip
    return finding(
        code, "warn", "The target of each position is its own input token, which its output sees: there is nothing to predict.", **numbers,
        advice=["Shift the targets: inputs are tokens[:-1], targets tokens[1:]. Where the task is to copy, leave it as it is."],
    )  # fmt: skip


def _unused(facts: Facts, columns: float, slices: float) -> Finding:
    code, found = "input.unused_features", facts.get("unused")
    if not isinstance(found, list):
        return unmeasured(code, facts, "unused")
    if not found:
        return finding(
            code, "ok", "Does not apply: no inputs that vary and whose parts can be exchanged between examples."
        )
    evidence = {"axes": found}
    shares = [
        (len(each["unused"]) / each["looked"], columns if len(each["shape"]) == 1 else slices, each) for each in found
    ]
    share, limit, worst = max(shares, key=lambda s: s[0] / s[1])
    numbers: dict[str, Any] = {"value": share, "unit": "share", "threshold": limit, "evidence": evidence}
    if share < limit:
        left = f"; {share:.0%} along axis {worst['axis']} make no difference" if share else ""
        return finding(code, "ok", f"The inputs that vary reach the outputs{left}.", **numbers)
    some = ", ".join(map(str, worst["unused"][:8])) + (", ..." if len(worst["unused"]) > 8 else "")
    return finding(
        code, "warn",
        f"{len(worst['unused'])} of {worst['looked']} slices of the inputs along axis {worst['axis']} never reach the outputs: {some}.", **numbers,
        advice=["Check slices and indices in the forward pass, and the number of input channels; drop inputs that are not meant to count."],
    )  # fmt: skip


def _constant(facts: Facts, limit: float) -> Finding:
    code = "init.constant_output"
    before, after = part(facts, "spread"), part(facts, "fitted_spread")
    if before is None or after is None:
        return unmeasured(code, facts, "spread" if before is None else "fitted_spread")
    if not before["outputs"] or not before["inputs_vary"]:
        return finding(
            code, "ok", "Does not apply: inputs do not vary, or outputs have no row for each example.", evidence=before
        )
    evidence = {"fresh": before, "fitted": after}
    ratios = [each["spread"] / each["size"] if each["size"] else 0.0 for each in (before, after) if _number(each)]
    if not ratios:
        return finding(
            code, "ok", "Does not apply: the outputs are not finite, as other findings say.", evidence=evidence
        )
    numbers: dict[str, Any] = {"value": max(ratios), "unit": "ratio", "threshold": limit, "evidence": evidence}
    if max(ratios) > limit:
        return finding(code, "ok", "The outputs differ from example to example.", **numbers)
    return finding(
        code, "fail", "The outputs are the same for all examples, in the fresh model and after it was fitted to one batch.", **numbers,
        advice=[
            "Check that the forward pass uses its input, and that no layer returns a constant: units that are off for all examples, or weights of zero.",
        ],
    )  # fmt: skip


def _number(each: Mapping[str, Any]) -> bool:
    return all(isinstance(each[name], (int, float)) for name in ("spread", "size"))


def _modes(facts: Facts, limit: float) -> list[Finding]:
    modes, loss = part(facts, "modes"), part(facts, "loss")
    if modes is None:
        return [unmeasured(code, facts, "modes") for code in _OWN[:3]]
    return [_left_in_training(modes), _left_in_evaluation(modes), _nondeterministic(modes, loss, limit)]


def _left_in_training(modes: Facts) -> Finding:
    left = modes["train_in_eval"]
    evidence = {"modules": left}
    if not left:
        said = "After model.eval() every dropout and batch norm is in evaluation mode."
        return finding("loop.train_mode_in_eval", "ok", said, evidence=evidence)
    norms = [name for name, kind in left.items() if kind == "batch_norm"]
    does = "evaluates with the statistics of its batch, and changes its own" if norms else "drops units in evaluation"
    return finding(
        "loop.train_mode_in_eval", "fail" if norms else "warn", value=float(len(left)), unit="modules", evidence=evidence,
        summary=f"After model.eval() {named(norms or list(left))} is still in training mode: it {does}.",
        advice=["Let train(mode) of the model pass `mode` on to every module, and call train() nowhere in forward."],
    )  # fmt: skip


def _left_in_evaluation(modes: Facts) -> Finding:
    left = {name: kind for name, kind in modes["eval_in_train"].items() if kind != "frozen"}
    evidence = {"modules": modes["eval_in_train"]}
    if not left:
        frozen = len(modes["eval_in_train"])
        said = "After model.train() every dropout and batch norm is in training mode"
        said += f", but for {frozen} in parts that are frozen on purpose." if frozen else "."
        return finding("loop.eval_mode_in_training", "ok", said, evidence=evidence)
    norms = [name for name, kind in left.items() if kind == "batch_norm"]
    does = "normalises by statistics that were never taken" if norms else "drops nothing"
    return finding(
        "loop.eval_mode_in_training", "warn", value=float(len(left)), unit="modules", evidence=evidence,
        summary=f"In training {named(norms or list(left))} is in evaluation mode: it {does}.",
        advice=["Let train(mode) of the model pass `mode` on to every module, and call eval() nowhere in forward."],
    )  # fmt: skip


def _nondeterministic(modes: Facts, loss: Facts | None, limit: float) -> Finding:
    code, change, size = "evaluation.nondeterministic", modes["change"], modes["size"]
    evidence = {name: modes[name] for name in ("change", "size", "masks", "draws")}
    if not all(isinstance(number, (int, float)) for number in (change, size)):
        return finding(
            code, "not_measured", "Not measured: the outputs of the untrained model are not finite.", evidence=evidence
        )
    ratio = change / size if size else float(change > 0)
    numbers: dict[str, Any] = {"value": ratio, "unit": "ratio", "threshold": limit, "evidence": evidence}
    if ratio <= limit:
        return finding(code, "ok", "Two evaluations of one batch give the same outputs.", **numbers)
    said = f"Two evaluations of one batch differ by {ratio:.2g} times what examples differ by"
    if modes["train_in_eval"]:
        return finding(code, "ok", f"{said}, by modules that stay in training mode.", **numbers)
    if modes["masks"]:
        return finding(
            code, "warn", f"{said}: dropout is applied in evaluation, in {named(modes['masks'])}.", **numbers,
            advice=["Pass training=self.training to F.dropout, or use nn.Dropout; or leave it, if many draws are averaged on purpose."],
        )  # fmt: skip
    if loss is None or loss["kind"] is None:
        return finding(
            code, "ok", f"{said}: the model draws random numbers, as a model of a distribution may.", **numbers
        )
    return finding(
        code, "warn", f"{said}: {named(modes['draws']) or 'the model'} draws random numbers in evaluation.", **numbers,
        advice=["Add noise only `if self.training`; or leave it, if many draws are averaged on purpose."],
    )  # fmt: skip
