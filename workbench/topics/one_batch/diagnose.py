"""`diagnose_one_batch`: what one batch told before training: can it be fitted, does the right thing reach outputs and loss?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import pairwise

from workbench.curves.losses import DEEP, bottomless
from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, Status, named
from workbench.topics.one_batch.diagnose_layers import (
    CONSTANT_CODES,
    LAYER_CODES,
    Facts,
    constant_output,
    has_numbers,
    layer_findings,
    part,
    why_not,
)
from workbench.topics.one_batch.diagnose_metrics import METRIC_CODES, metric_finding

FEWEST = 4  # trained parameters from which on a model can be asked to fit as many examples (rule of thumb)
_LOSS = ("loss.unbounded", "loss.broadcast", "loss.double_softmax", "loss.output_range")
CODES = Codes(
    dict.fromkeys(("loop.train_mode_in_eval", "loop.eval_mode_in_training", "evaluation.nondeterministic", "loop.batch_dependence",
                   "loop.sees_target", "input.unused_features"), "F1.1")
    | CONSTANT_CODES | dict.fromkeys(_LOSS, "F1.1") | METRIC_CODES | LAYER_CODES
    | {"loop.overfit_one_batch": "F1.1"}
)  # fmt: skip


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
    """
    facts = record.facts.get("one_batch")
    if not facts:
        otherwise = "one batch was not examined; `workbench diagnose` does that before training"
        return Diagnosis.of(record, CODES.missing(record.facts, "one_batch", otherwise))
    fits = _fits(facts, least_progress)
    findings = (
        *_modes(facts, random),
        _coupling(facts, coupled),
        _answer(facts),
        _unused(facts, unused_columns, unused_slices),
        _constant(facts, constant),
        *_losses(facts, record, deep, nothing),
        metric_finding(facts),
        *layer_findings(facts, fits=fits.status != "fail"),
        fits,
    )
    return Diagnosis.of(record, findings)


def _modes(facts: Facts, limit: float) -> list[Finding]:
    modes = part(facts, "modes")
    if modes is None:
        return [CODES.not_measured(code, why_not(facts, "modes")) for code in list(CODES)[:3]]
    kept = {name: kind for name, kind in modes["eval_in_train"].items() if kind != "frozen"}
    frozen = len(modes["eval_in_train"]) - len(kept)
    design = f", but for {frozen} in parts that are frozen on purpose" if frozen else ""
    return [
        _mode(
            "loop.train_mode_in_eval", modes["train_in_eval"], modes["train_in_eval"], call="train()",
            right="After model.eval() every dropout and batch norm is in evaluation mode.", wrong="After model.eval() {} is still in training mode",
            norm="evaluates with the statistics of its batch, and changes its own", dropout="drops units in evaluation",
        ),
        _mode(
            "loop.eval_mode_in_training", kept, modes["eval_in_train"], call="eval()",
            right=f"After model.train() every dropout and batch norm is in training mode{design}.", wrong="In training {} is in evaluation mode",
            norm="normalises by statistics that were never estimated", dropout="drops nothing",
        ),
        _nondeterministic(modes, part(facts, "loss"), limit),
    ]  # fmt: skip


def _mode(
    code: str, left: Facts, every: Facts, *, call: str, right: str, wrong: str, norm: str, dropout: str
) -> Finding:
    """Judge the modules that are `left` in the wrong mode, and say what batch norm or dropout does there."""
    say = partial(CODES.finding, code, evidence={"modules": every})
    if not left:
        return say("ok", right)
    norms = [name for name, kind in left.items() if kind == "batch_norm"]
    said = f"{wrong.format(named(norms or list(left)))}: it {norm if norms else dropout}."
    fix = f"Let train(mode) of the model pass `mode` on to every module, and call {call} nowhere in forward."
    status: Status = "fail" if norms and code == "loop.train_mode_in_eval" else "warn"
    return say(status, said, value=float(len(left)), unit="modules", advice=[fix])


def _nondeterministic(modes: Facts, loss: Facts | None, limit: float) -> Finding:
    code, change, size = "evaluation.nondeterministic", modes["change"], modes["size"]
    evidence = {name: modes[name] for name in ("change", "size", "masks", "draws")}
    if not has_numbers(change, size):
        return CODES.not_measured(code, "the outputs of the untrained model are not finite", evidence=evidence)
    ratio = change / size if size else float(change > 0)
    say = partial(CODES.finding, code, value=ratio, unit="ratio", threshold=limit, evidence=evidence)
    if ratio <= limit:
        return say("ok", "Two evaluations of one batch give the same outputs.")
    said = f"Two evaluations of one batch differ by {ratio:.2g} times the difference between examples"
    if modes["train_in_eval"]:
        return say("ok", f"{said}, by modules that stay in training mode.")
    if modes["masks"]:
        fix = "Pass training=self.training to F.dropout, or use nn.Dropout; or leave it, if many draws are averaged on purpose."
        return say("warn", f"{said}: dropout is applied in evaluation, in {named(modes['masks'])}.", advice=[fix])
    if loss is None or loss["kind"] is None:
        return say("ok", f"{said}: the model draws random numbers, as a model of a distribution may.")
    fix = "Add noise only `if self.training`; or leave it, if many draws are averaged on purpose."
    return say("warn", f"{said}: {named(modes['draws']) or 'the model'} draws random numbers in evaluation.", advice=[fix])  # fmt: skip


def _coupling(facts: Facts, limit: float) -> Finding:
    code, found, modes = "loop.batch_dependence", part(facts, "coupling"), part(facts, "modes") or {}
    if found is None:
        return CODES.not_measured(code, why_not(facts, "coupling"))
    ratio = found["ratio"]
    if ratio is None:
        return CODES.finding(code, "ok", "Does not apply: no outputs that differ from example to example.", evidence=found)  # fmt: skip
    say = partial(CODES.finding, code, value=ratio, unit="ratio", threshold=limit, evidence=found)
    if ratio <= limit:
        return say("ok", "In evaluation the outputs of an example do not depend on the others.")
    said = f"In evaluation the outputs of an example depend on the other examples of its batch ({ratio:.2g} times as much as on itself)"
    if "batch_norm" in modes.get("train_in_eval", {}).values():
        return say("ok", f"{said}, by batch norm that stays in training mode.")
    if modes.get("batch_statistics"):
        fix = "Set track_running_stats=True, or take GroupNorm: otherwise a prediction depends on its batch."
        return say("warn", f"{said}: {named(modes['batch_statistics'])} keeps no running statistics.", advice=[fix])
    loss = part(facts, "loss")
    return say(
        "warn" if loss is not None and loss["kind"] is None else "fail", f"{said}.",
        advice=[
            "Look for a view or reshape that mixes the batch axis with another, and for a mean, softmax or norm over axis 0.",
            "Set batch_first=True where nn.RNN, LSTM, GRU, MultiheadAttention or Transformer get (batch, length, width).",
        ],
    )  # fmt: skip


def _answer(facts: Facts) -> Finding:
    code, found = "loop.sees_target", facts.get("answer")
    if isinstance(found, Mapping) and "reason" in found:
        return CODES.not_measured(code, why_not(facts, "answer"))
    if not found:
        return CODES.finding(code, "ok", "Does not apply: inputs and targets are no sequences of the same tokens.")
    return sees_target(found)


def sees_target(found: Facts, line: str = "") -> Finding:
    """Judge where targets stand in the tokens, and whether outputs depend on them; `line` is where they are compared."""
    say = partial(CODES.finding, "loop.sees_target", value=found["agree"], unit="share", evidence=dict(found))
    if not found["sees"]:
        return say("ok", "The output of a position does not depend on the token that it has to predict.")
    if found["offset"]:
        return say(
            "fail", f"The output of a position depends on later tokens, and the next one is its target{line}: the model is shown the answer.",
            advice=["Mask later positions in attention (is_causal=True, or a causal mask before the softmax over keys), and read sequences in one direction alone."],
        )  # fmt: skip
    return say(
        "warn", f"The target of each position is its own input token{line}, which its output sees: there is nothing to predict.",
        advice=["Shift the targets: inputs are tokens[:-1], targets tokens[1:]. Where the task is to copy, leave it as it is."],
    )  # fmt: skip


def _unused(facts: Facts, columns: float, slices: float) -> Finding:
    code, found = "input.unused_features", facts.get("unused")
    if not isinstance(found, list):
        return CODES.not_measured(code, why_not(facts, "unused"))
    if not found:
        return CODES.finding(code, "ok", "Does not apply: no inputs that vary and whose parts can be exchanged between examples.")  # fmt: skip
    limits = [columns if len(each["shape"]) == 1 else slices for each in found]
    shares = [(len(each["unused"]) / each["looked"], limit, each) for each, limit in zip(found, limits, strict=True)]
    share, limit, worst = max(shares, key=lambda s: s[0] / s[1])
    unused, axis = worst["unused"], worst["axis"]
    say = partial(CODES.finding, code, value=share, unit="share", threshold=limit, evidence={"axes": found})
    if share < limit:
        left = f"; {share:.0%} along axis {axis} make no difference" if share else ""
        return say("ok", f"The inputs that vary reach the outputs{left}.")
    some = ", ".join(map(str, unused[:8])) + (", ..." if len(unused) > 8 else "")
    return say(
        "warn", f"{len(unused)} of {worst['looked']} slices of the inputs along axis {axis} never reach the outputs: {some}.",
        advice=["Check slices and indices in the forward pass, and the number of input channels; drop inputs that are not meant to count."],
    )  # fmt: skip


def _constant(facts: Facts, limit: float) -> Finding:
    before, after = part(facts, "spread"), part(facts, "fitted_spread")
    if before is None or after is None:
        return CODES.not_measured(
            "init.constant_output", why_not(facts, "spread" if before is None else "fitted_spread")
        )
    return constant_output(before, after, limit, "after it was fitted to one batch")


def _losses(facts: Facts, record: RecordLike, deep: float, nothing: float) -> list[Finding]:
    loss = part(facts, "loss")
    found = [CODES.not_measured(code, why_not(facts, "loss")) for code in _LOSS]
    if loss is not None:
        found = [_unbounded(loss), _broadcast(loss), _double(loss), range_finding(loss)]
    if found[0].status != "fail":
        found[0] = falls_without_end(record, deep=deep) or _ignores_inputs(record, nothing) or found[0]
    return found


def falls_without_end(record: RecordLike, *, deep: float = DEEP) -> Finding | None:
    """Return a failure where the training loss of a run has no end (see `bottomless`), else None."""
    found = bottomless(record, deep=deep)
    if found is None:
        return None
    lowest, lr, start = found
    return CODES.finding(
        "loss.unbounded", "fail", f"The training loss falls from {start:.3g} to {lowest:.3g} at lr {lr:.3g}, and keeps falling: it has no minimum.",
        value=lowest, unit="loss",
        advice=("Look for a term that rewards ever larger or smaller outputs: logits where log-probabilities are asked for, the sign of a "
                "log-determinant or a log variance, a missing exponential or square.",),
    )  # fmt: skip


def _ignores_inputs(record: RecordLike, nothing: float) -> Finding | None:
    """Return a failure where one and the same output for every example takes nearly all of the loss away."""
    constant = record.facts.get("chance_loss")
    first = ((record.facts.get("preflight") or {}).get("train") or {}).get("loss")
    if constant is None or first is None or not 0 <= constant < nothing * first:
        return None
    return CODES.finding(
        "loss.unbounded", "fail", f"One and the same output for every example takes the loss from {first:.3g} to {constant:.3g}: the loss does not depend on the inputs.",
        value=constant, unit="loss", threshold=nothing * first,
        advice=("Look for a term that is missing, such as the logarithm of a variance that the error is divided by, and for targets that "
                "are all the same.",),
    )  # fmt: skip


def _unbounded(loss: Facts, limit: float = 10.0) -> Finding:
    """Judge how many times its first value the loss falls, far away from the outputs: beyond `limit` it has no bound (rule of thumb)."""
    found, say = loss["escape"], partial(CODES.finding, "loss.unbounded")
    negate = ("Negate the loss: what is minimised is the error, or the negative log-likelihood.",)
    if loss["reversed"]:
        return say("fail", "The loss of every example falls as the output of the right class falls: its sign is wrong.", advice=negate)  # fmt: skip
    if found is None or not has_numbers(*found["falls"]):
        return say("ok", "The loss is undefined or infinite for outputs far from those of the model.")
    grows = all(later < 3 * earlier < 0 for earlier, later in pairwise(found["falls"]))
    value = -found["falls"][-1] / max(found["start"], 1e-30)
    say = partial(say, value=value, unit="times", threshold=limit, evidence=found)
    if not (grows and value > limit and found["share"] >= 0.9):
        return say("ok", "The loss does not fall without end as outputs go far away.")
    return say("fail", "The loss falls without end as outputs go wrong, for every example and in every direction: its sign is wrong.", advice=negate)  # fmt: skip


def _broadcast(loss: Facts) -> Finding:
    over, say = loss["broadcast"], partial(CODES.finding, "loss.broadcast")
    if over == "":
        return CODES.not_measured("loss.broadcast", "the loss, or the batch, cannot be taken apart into examples")
    if over is None:
        return say("ok", "The loss compares the outputs of an example with its own targets.")
    return say(
        "fail", f"The loss of an example is a mean over the {over} of all examples, which is best at one constant output.",
        evidence={"over": over},
        advice=["Make the shapes equal before they are compared: outputs (batch, 1) against targets (batch,) broadcast to (batch, batch); .squeeze(-1)."],
    )  # fmt: skip


def _double(loss: Facts) -> Finding:
    code = "loss.double_softmax"
    if loss["kind"] not in ("classes", "binary"):
        return CODES.finding(code, "ok", "Does not apply: the loss is no cross-entropy of logits.")
    floor, reachable = loss["floor"], loss["reachable"]
    evidence = {name: loss[name] for name in ("kind", "head", "floor", "reachable", "ignorant", "classes")}
    say = partial(CODES.finding, code, value=reachable, unit="loss", threshold=floor, evidence=evidence)
    # ideal logits leave exactly what a second softmax leaves, log(C - 1 + e) - 1 of log(C), or a second sigmoid, which takes 1 and 0 of
    # the first for logits, and 1/2 where nothing is known
    wrong: tuple[float, ...] = ((math.log(loss["classes"] - 1 + math.e) - 1) / math.log(loss["classes"]),)
    if loss["kind"] == "binary":
        wrong = (math.log1p(math.exp(-1)) / math.log1p(math.exp(-0.5)), math.log(2) / math.log1p(math.exp(0.5)))
    inside = all(min(abs(ratio - each) for each in wrong) < 1e-3 for ratio in loss["floor_ratios"])
    if not inside and not (loss["head"] in ("Softmax", "Sigmoid") and reachable > floor + 0.1 * loss["ignorant"]):
        return say("ok", "The loss expects logits, and gets them.")
    where = "the loss applies softmax or sigmoid twice"
    if not inside:
        where = f"the model ends in a {loss['head'].lower()}, and the loss applies its own"
    return say(
        "fail", f"Probabilities are taken for logits: {where}. The loss cannot fall below {reachable:.3g}.",
        advice=["Give the loss the logits: drop the softmax or sigmoid before it, and use it for predictions alone."],
    )  # fmt: skip


def range_finding(loss: Facts, limit: float = 0.05, cosines: float = 0.6) -> Finding:
    """Judge the share of what there is to learn that the last operation of the model puts out of reach.

    Args:
        loss: what is known of the loss, see `find_loss`.
        limit: the largest share (rule of thumb).
        cosines: the same of cosines that are divided by a temperature (rule of thumb: SimCLR's 0.5 leaves 0.43 of 1,024 candidates).
    """
    kind, reachable, say = loss["kind"], loss.get("reachable"), partial(CODES.finding, "loss.output_range")
    if kind is None or loss["range"] is None:
        bounds = "the last operation of the model has no bounds"
        return say("ok", f"Does not apply: {bounds if kind else 'what the loss asks of the outputs is unknown'}.")
    if kind != "regression" and loss["head"] in ("Softmax", "Sigmoid"):
        return say("ok", "Does not apply: loss.double_softmax judges probabilities that are taken for logits.")
    learnable = loss["ignorant"] - loss["floor"]
    share = (reachable - loss["floor"]) / learnable if learnable > 0 else 0.0
    ends, fix = (
        f"The model ends in a {loss['head'].lower()}",
        "End the model in a linear layer, or scale the targets into the range of its activation function.",
    )
    if loss["head"] == "Cosine":
        limit, fix = cosines, "Divide the cosines by a temperature of 0.05 to 0.5, or learn their scale."
        ends = f"The outputs are cosines between {loss['range'][0]:.3g} and {loss['range'][1]:.3g}"
    say = partial(say, value=share, unit="share", threshold=limit, evidence=dict(loss))
    if share <= limit:
        return say("ok", f"{ends}, whose range reaches the targets.")
    asked = "the loss takes logits of any size"
    if kind == "regression":
        asked = f"targets go from {loss['target_low']:.3g} to {loss['target_high']:.3g}"
    return say(
        "fail" if share >= 0.5 else "warn", f"{ends}, but {asked}: whatever it learns, the loss of this batch is no less than {reachable:.3g}"
        f"{', more than' if share > 1 else '; it is'} {loss['ignorant']:.3g} for one and the same output without such bounds.",
        advice=[fix],
    )  # fmt: skip


def _fits(facts: Facts, least: float) -> Finding:
    code, fit = "loop.overfit_one_batch", part(facts, "fit")
    if fit is None:
        return CODES.not_measured(code, why_not(facts, "fit"))
    if fit["parameters"] < FEWEST:
        return CODES.finding(code, "ok", f"Does not apply: {fit['parameters']} parameters cannot tell examples apart.")
    runs, lrs = fit["runs"], [run["lr"] for run in fit["runs"]]
    progress = [run["progress"] for run in runs]
    best, start = max(progress), runs[0]["loss"][0]
    run = runs[progress.index(best)]
    evidence = {
        "lrs": lrs, "optimizers": [run["optimizer"] for run in runs], "progress": progress, "first_loss": start,
        "last_losses": [run["loss"][-1] for run in runs], "examples": fit["examples"],
    }  # fmt: skip
    say = partial(CODES.finding, code, value=best, unit="share", threshold=least, evidence=evidence)
    if runs[0]["descent"] is not None and runs[0]["descent"] < 0:
        fix = "Leave out maximize=True, or negate what the optimizer gets; a loss is minimised."
        return say("fail", "The optimizer moves up the gradient: its first update makes the loss larger.", advice=[fix])
    if best >= least:
        took = f"{run['steps']} steps at lr {run['lr']:.3g} take its loss from {run['loss'][0]:.4g} to {run['loss'][-1]:.4g}"
        return say("ok", f"One batch can be fitted: {took}.")
    if fit["cut_short"]:
        said = f"{sum(run['steps'] for run in runs)} steps on one batch took too long to try other learning rates"
        return CODES.not_measured(code, said, evidence=evidence)
    if not abs(start or 0.0) > 0:
        return CODES.finding(code, "ok", "Does not apply: the loss of the fresh model is 0.", evidence=evidence)
    return say(
        "fail", f"{fit['examples']} examples of one batch cannot be fitted at any of {len(runs)} learning rates from {min(lrs):.3g} to {max(lrs):.3g}: "
        "the outputs do not tell them apart.",
        advice=[
            "Look for what keeps inputs, targets or gradients from the model, or for a term that outweighs the rest of the loss, such as a KL term summed beside a reconstruction that is a mean: "
            "the other findings name it where they can.",
            "Make the model fit these examples before anything else is tuned.",
        ],
    )  # fmt: skip
