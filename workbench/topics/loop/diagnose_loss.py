"""Findings about what a loop gives to its loss functions, and what it does with their results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from workbench.curves.trial_curves import RecordLike
from workbench.findings.finding import Codes, Finding, Status
from workbench.record.metrics import larger_is_better, ranks
from workbench.topics.loop.known import at, rows_of, where_known
from workbench.topics.one_batch.diagnose import sees_target
from workbench.topics.one_batch.diagnose_layers import (
    constant_output,
    dead_units,
    dropped_units,
    equal_units,
    has_numbers,
    linear_layers,
    saturated_units,
    signals,
)
from workbench.topics.one_batch.diagnose_preflight import initial_loss

LOSS_CODES = Codes({
    "loss.broadcast": "F1.1", "loss.double_softmax": "F1.1", "loss.floor": "F1.1", "loss.metric_disagrees": "F1.1", "loop.sees_target": "F1.1", "loop.batch_dependence": "F1.1", "units.dropped": "F2.4",
    "units.equal": "F2.4", "units.dead": "F2.4", "units.saturated": "F2.4", "units.linear": "F2.4", "gradients.vanishing": "F2.4", "gradients.exploding": "F2.4", "init.constant_output": "F2.4", "init.loss": "F2.4",
})  # fmt: skip
_OF_CLASSES = ("cross_entropy", "nll_loss", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits")
_UNITS = ("units.equal", "units.dead", "units.saturated", "units.linear", "gradients.vanishing", "gradients.exploding")
_FRESH = ("init.constant_output", "init.loss")
_SOON = 7
"""Updates after which weights that began at zero have moved apart (rule of thumb)."""
_FEWEST_ROWS, _LEARNS, _KNOWS = 16, 0.9, 0.8
"""Examples or places that tell a unit that is off, part of its first loss that a training which learns comes below, and of a guess's that a fresh model does not (rules of thumb)."""
_TWICE_SIGMOID = math.log1p(math.exp(-1.0))
"""Below which binary cross-entropy of a probability that is taken for a logit cannot fall: 0.313."""
Facts = Mapping[str, Any]
Say = Callable[..., Finding]


def loss_findings(record: RecordLike, facts: Facts, *, floor_share: float, most_dropped: float) -> list[Finding]:
    """Return the findings of `LOSS_CODES`; see `diagnose_loop`."""
    return [
        *where_known(
            LOSS_CODES,
            ("loss.broadcast", "loss.double_softmax"),
            lambda: _criteria(facts["criteria"], facts["loaders"], facts["answers"] or {}),
        ),
        *where_known(LOSS_CODES, ["loss.floor"], lambda: _floor(record, facts["floor"], floor_share)),
        _scores(record),
        *where_known(LOSS_CODES, ["loop.sees_target"], lambda: _answers(facts["answers"])),
        *where_known(
            LOSS_CODES,
            ["loop.batch_dependence"],
            lambda: (
                _turned(facts["units"].get("axes"))
                or _classes(facts["classes"], facts["answers"] or {}, facts["others"])
            ),
        ),
        *where_known(
            LOSS_CODES,
            ["units.dropped"],
            lambda: dropped_units(facts["dropped"]["p"], facts["dropped"]["line"], most=most_dropped),
        ),
        *where_known(LOSS_CODES, _UNITS, lambda: _units(record, facts["units"], facts["data"])),
        *where_known(
            LOSS_CODES, _FRESH, lambda: _fresh(facts["data"], _reproduced(facts["reproduced"], facts["updates"]))
        ),
    ]


def _floor(record: RecordLike, found: Facts, share: float, values_share: float = 0.5) -> Finding:
    say: Say = partial(LOSS_CODES.finding, "loss.floor", evidence=dict(found))
    bound, shifts, passes, part = found["bound"], found["shifts"], found["passes"], 0.0
    values = found.get("of_values", False)  # each example's loss, not their mean
    if bound is not None:
        losses = rows_of(record).get("loss", pd.Series(dtype=float)).dropna()  # of all updates; few are looked at
        there = np.isclose(losses, found.get("bound_given", math.nan), rtol=1e-2 if values else 1e-6, atol=0.0)
        part = max(found["at_bound"] / passes, float(there.mean()) if len(losses) else 0.0)
        passes = max(passes, len(losses))
    if values and part > values_share:
        return say(
            "fail", f"Each value of the loss is bounded from below by {bound:.3g}{at(found, 'line')}, and {part:.0%} of them lie there, where they give no gradient.", value=part,
            unit="share of values", threshold=values_share, advice=["Leave the clamp of the loss out, or bound what needs it, such as a logarithm's argument."],
        )  # fmt: skip
    if part > share and not values:
        return say(
            "fail", f"The loss is bounded from below by {bound:.3g}{at(found, 'line')} and lies there in {part:.0%} of the passes, in which nothing gets a gradient.", value=part,
            unit="share of passes", threshold=share, advice=["Leave the clamp of the loss out, or bound what needs it, such as a logarithm's argument."],
        )  # fmt: skip
    constant = shifts is not None and shifts[0] > 0 and shifts[1] - shifts[0] <= 1e-3 * shifts[1]
    if constant and shifts[0] > share * found["shifted_loss"]:
        return say(
            "warn", f"A constant of {shifts[0]:.3g} is part of the loss{at(found, 'line')}: it cannot fall below that, and changes no gradient.", value=shifts[0],
            unit="of the loss", advice=["Leave the constant out of the loss; a penalty that should train must not be detached or computed within no_grad()."],
        )  # fmt: skip
    if bound is not None:
        came = f"{part:.0%} of its values lie there" if values else f"has not come there in {passes} passes"
        return say("ok", f"The loss is bounded from below by {bound:.3g}{at(found, 'line')}, and {came}.")
    if constant:
        return say("ok", f"A constant of {shifts[0]:.3g} is part of the loss{at(found, 'line')}, too small to matter.")
    return say("ok", "No constant was seen to be added to the loss, and it does not lie at a bound.")


_OPPONENT = re.compile(r"(^|[_/])(d|disc|discriminator|domain)(_|$)")
"""What is trained against: it is to be deceived in the end."""


def _scores(record: RecordLike, *, least: int = 4, below: float = 0.4, lost: float = 0.7, many: int = 50) -> Finding:
    """Judge scores that are logged `least` times or more.

    Shares of pairs in the right order are told where all in the later half are below 0.5, and half of them below `below`; others where all in the
    later half are below `lost` times the first one. Of `many`, as of episodes, one says little: nine tenths of the later half, and the mean of the first tenth (rules of thumb).
    """
    say: Say = partial(LOSS_CODES.finding, "loss.metric_disagrees")
    evals = record.evals
    told = map(str, evals["metric"].unique() if "metric" in evals else ())
    names = [name for name in told if larger_is_better(name) and not _OPPONENT.search(name.lower())]
    for name in names:
        values = evals.loc[evals["metric"] == name, "value"].dropna()
        later, several = values.iloc[len(values) // 2 :], len(values) >= many
        first = values.iloc[: len(values) // 10 if several else 1].mean()
        if len(values) >= least and 0 <= later.quantile(0.9 if several else 1.0) < lost * first:
            return say(
                "warn", f"{name} falls from {first:.3g} in the first {'tenth ' * several}of {len(values)} evaluations to {later.median():.3g} in their later half: training makes it worse.",
                value=float(later.median() / first), unit="of the first", threshold=lost,
                advice=["Look at a sign, of the loss or of its targets, such as those of a ranking loss; and whether loss and score want the same outputs."],
            )  # fmt: skip
        if ranks(name) and len(values) >= least and later.max() < 0.5 and later.median() < below:
            return say(
                "warn", f"{name} is {later.median():.3g} in the later half of {len(values)} evaluations, and 0.5 by chance: what is trained orders examples the wrong way round.",
                value=float(later.median()), unit=name, threshold=0.5,
                advice=["Look at a sign: of the loss, or of what is ranked. Cox's loss sums over those still at risk: sort by descending times. Where the metric takes a time and the model gives a risk, negate it."],
            )  # fmt: skip
    return say(
        "ok",
        f"Training does not make {', '.join(names)} worse."
        if names
        else "Does not apply: no score was logged of which larger is better.",
    )


def _units(record: RecordLike, found: Facts, data: Facts) -> list[Finding]:
    """Judge units before the first update and after some more; a model that begins better than a guess is trained already, and its units are as they were learnt."""
    losses = rows_of(record).get("loss", pd.Series(dtype=float)).dropna()
    part = max(len(losses) // 10, 1)
    learns = len(losses) > 1 and losses.iloc[-part:].median() < _LEARNS * losses.iloc[:part].median()
    fresh, loss = data.get("fresh") or {"loss": None}, data.get("range") or {}
    if not all(found["looks"]) or (found["opaque"] and not found["units"]):
        why = "fewer than six updates were made, or a part of the model is compiled, checkpointed or hooked, and does not show its units"
        return [LOSS_CODES.not_measured(code, why) for code in _UNITS]
    equal = equal_units({"equal": found["equal"], "not_in_graph": ()}, {"equal": found["equal_later"]})
    guesses = loss.get("kind") in ("classes", "binary") and has_numbers(fresh["loss"])
    if guesses and fresh["loss"] < _KNOWS * min(loss["ignorant"], loss["constant"]):
        trained = "Does not apply: the model was trained before."
        return [equal, *(LOSS_CODES.finding(code, "ok", trained) for code in _UNITS[1:])]
    seen = [each for each in found["units"] if each["later"]["rows"] >= _FEWEST_ROWS]
    units = [each | {"module": each["module"] or "its layer"} for each in seen]
    bad: Status = "warn" if learns else "fail"
    judged = [judge(units, bad, where="behind") for judge in (dead_units, saturated_units)]
    vanishing, exploding = signals(found, bad, apart=equal.status == "ok")
    return [equal, *judged, linear_layers(found["in_a_row"]), _flat(found.get("curved")) or vanishing, exploding]


def _flat(looks: Sequence[bool] | None) -> Finding | None:
    """Return a failure where, in all graphs that have derivatives of derivatives through piecewise linear activation functions, such are 0 everywhere; else None."""
    if not looks or any(looks):
        return None
    return LOSS_CODES.finding(
        "gradients.vanishing", "fail", "The loss has second derivatives of the model by its inputs, and they are 0 for every example: its activation functions are linear piece by piece, like ReLU.",
        advice=["Take a smooth activation function, such as nn.Tanh, nn.SiLU or nn.Softplus, where a loss has second derivatives, as that of a physics-informed network."],
    )  # fmt: skip


def _reproduced(
    looks: Sequence[tuple[int, float, float]],
    updates: int,
    *,
    short: int = 500,
    least: int = 2,
    same: float = 0.9,
    limit: float = 0.02,
) -> Finding | None:
    """Return a failure where outputs that are to be the inputs do not follow them in the later half of training; else None.

    Args:
        short: runs of fewer updates tell nothing: variational autoencoders that learn well begin with 250 in which they follow nothing (rule of thumb).
        least: looks at them (rule of thumb).
        same: squared correlation from which on targets are the inputs, whatever they are scaled by (rule of thumb).
        limit: the largest of outputs that follow nothing (rule of thumb: chance leaves a part of one over the examples of a batch).
    """
    late = [look for look in looks if 2 * look[0] >= updates]
    if updates < short or len(late) < least:
        return None
    inputs, outputs = min(look[1] for look in late), max(look[2] for look in late)
    if not (inputs >= same and outputs <= limit):
        return None
    return LOSS_CODES.finding(
        "init.constant_output", "fail", f"The outputs are to be the inputs, and follow less than {limit:.0%} of what these differ by in the later half of training: every example gets the mean one.",
        value=outputs, unit="squared correlation", threshold=limit, evidence={"looks": [list(look) for look in looks]},
        advice=["In a variational autoencoder, lower the weight of the KL term (posterior collapse): sum the reconstruction over the pixels as the KL over the latents, and take the mean of both over the batch alone.",
                "Else look whether the decoder is given the code, and whether a layer before it is constant."],
    )  # fmt: skip


def _fresh(data: Facts, collapsed: Finding | None) -> list[Finding]:
    """Judge the first outputs that a loss function of torch was given; `collapsed` is what later ones are known to show."""
    fresh = data.get("fresh")
    if not fresh:
        none = "Does not apply: no loss was seen that compares outputs with targets of 40 examples or more."
        unknown = [LOSS_CODES.finding(code, "ok", none) for code in _FRESH]
        return [collapsed or unknown[0], unknown[1]]
    first, last = fresh["spreads"][0], fresh["spreads"][-1]
    constant = constant_output(first, last, 1e-6, f"after {last['update']} updates")
    if last["update"] < _SOON and constant.status == "fail":
        constant = LOSS_CODES.not_measured(constant.code, f"outputs were seen until update {last['update']} alone")
    loss, broken = (fresh["loss"], None) if has_numbers(fresh["loss"]) else (None, fresh["loss"])
    begun = {"train": {"classes": None, "loss": loss}, "first_loss": None, "nonfinite_loss": broken}
    return [collapsed or constant, initial_loss(begun, {"loss": data["range"], "spread": first})]


def _answers(found: Facts | None) -> Finding:
    if not found:
        none = "Does not apply: no targets were seen that stand in the tokens of an embedding."
        return LOSS_CODES.finding("loop.sees_target", "ok", none)
    if found["sees"] is None:
        why = "backward runs hooks, checkpointing or functions with a backward of their own, and is not run once more to ask"
        mixed = found.get("mixed") or found.get("others")
        return LOSS_CODES.not_measured(
            "loop.sees_target", "what a sequence is given depends on other ones" if mixed else why
        )
    return sees_target(found, at(found, "line"))


def _turned(found: Facts | None) -> Finding | None:
    """Return an alarm where a view or a softmax takes one axis for another; None where none was seen to."""
    if found is None:
        return None
    say: Say = partial(LOSS_CODES.finding, "loop.batch_dependence", evidence=dict(found))
    behind = f" behind {found['behind']}" if found["behind"] else ""
    if "summed" in found:
        return say(
            "warn", f"Weights of attention of shape {tuple(found['shape'])}{behind} sum to 1 over axis {found['axis']}, and weigh a sum over axis {found['summed']}{at(found, 'line')}: what a place gets depends on how many others there are.",
            advice=["Give softmax the axis of the keys, dim=-1. Where queries are to compete for keys, divide by the sum over the keys after it."],
        )  # fmt: skip
    return say(
        "warn", f"What comes{behind} is viewed from {tuple(found['before'])} as {tuple(found['after'])}{at(found, 'line')}: that keeps the order of the numbers, so that each place gets those of others.",
        advice=["Use transpose, permute or movedim to change the order of axes, and view or reshape only to merge or split neighbours: attention.transpose(1, 2).reshape(batch, length, width)."],
    )  # fmt: skip


def _classes(found: Facts | None, answers: Facts, others: Facts | None) -> Finding:
    say: Say = partial(LOSS_CODES.finding, "loop.batch_dependence", evidence=dict(found or {}))
    if answers.get("mixed"):
        return say(
            "warn", f"The output for a token depends on the other sequences of its batch{at(answers, 'line')}.",
            advice=["Give batch_first=True to the RNN or attention layer, which else takes (length, batch, features). Where the sequences of a batch are parts of one, leave it."],
        )  # fmt: skip
    if found is None or 2 * found["wrong"] <= found["looks"]:
        return _others(others, "" if found is None else "The softmax runs over the classes that the loss picks from.")
    name = "log_softmax" if found["log"] else "softmax"
    return say(
        "fail", f"{name} runs over axis {found['axis']} of {tuple(found['shape'])}, and the loss picks classes along another one{at(found, 'line')}: "
        "what an example, or a position, is given depends on the others.", advice=[f"Give {name} the axis of the classes, dim=-1 behind a linear layer and dim=1 behind a convolution."],
    )  # fmt: skip


def _others(found: Facts | None, well: str) -> Finding:
    """Judge whether an example's output depends on others; what `well` says of the classes stands where that was not asked."""
    say: Say = partial(LOSS_CODES.finding, "loop.batch_dependence", evidence=dict(found or {}))
    if found is None:
        return say(
            "ok", well or "Does not apply: no loss was seen that compares outputs whose axis of examples is known."
        )
    if found["rows"] is None:
        why = "backward runs hooks, checkpointing or functions with a backward of their own, and is not run once more to ask"
        return say("ok", well) if well else LOSS_CODES.not_measured("loop.batch_dependence", why)
    if found["coupled"] and (found["softmax"] or (found["drawn"] and not found["norm"])):
        name = {"Softmax": "softmax", "LogSoftmax": "log_softmax"}.get(found["softmax"], "")
        over = f"{name} runs over axis 0, the examples of a batch: " if name else ""
        return say(
            "warn", f"{over}{'the' if over else 'The'} output of an example depends on the others of its batch{at(found, 'line')}.", value=float(found["rows"]), unit="rows",
            advice=[f"Give {name} the axis of what it is to weigh, such as dim=-1. Where the rows are parts of one example, leave it." if name else
                    "Set batch_first=True where an RNN or attention layer gets (batch, length, features), and look for a view, mean or norm over axis 0. Where it is meant, leave it."],
        )  # fmt: skip
    if found["coupled"]:
        why = "by batch norm" if found["norm"] else "as those of a graph, a sequence or a set do"
        return say("ok", well or f"The rows of a batch depend on each other, {why}.")
    return say("ok", f"The output of an example does not depend on the others of its batch. {well}".strip())


def _lowest(name: str, row: Facts) -> float | None:
    """Return below what an example's loss cannot fall where probabilities are taken for logits: no class gets more than e of e + C - 1."""
    if name == "binary_cross_entropy_with_logits":
        return _TWICE_SIGMOID
    return math.log1p((row["classes"] - 1) / math.e) if name == "cross_entropy" and row.get("classes") else None


def _criteria(facts: Facts, batches: Facts, answers: Facts) -> list[Finding]:
    # batches, so that what stays the same is no targets: a grid, or levels
    others = 2 * batches["same"] < batches["compared"]
    broadcast = [
        each for each in facts.items() if each[1].get("broadcast") and not (others and each[1].get("same_target"))
    ]
    logs = {name for name, row in facts.items() if name == "nll_loss" and row.get("log_probabilities")}
    double = [(name, row) for name, row in facts.items() if row.get("probabilities") and name not in logs]
    say: Say = partial(LOSS_CODES.finding, "loss.broadcast", evidence={"calls": dict(facts)})
    if not facts:
        none = "no loss was seen that is known to be given outputs and targets, such as cross_entropy or mse_loss"
        return [LOSS_CODES.not_measured(code, none) for code in ("loss.broadcast", "loss.double_softmax")]
    first = say("ok", "Outputs and targets have the same shape.")
    if broadcast:
        name, row = broadcast[0]
        inputs, target = row["broadcast"]
        first = say("fail", f"{name} compares outputs of shape {tuple(inputs)} with targets of shape {tuple(target)}{at(row, 'line')}: each output is "
                    "compared with every target.", advice=["Give both the same shape: outputs.squeeze(-1), or targets.unsqueeze(-1)."])  # fmt: skip
    elif mixed := next((row for _, row in facts.items() if row.get("mixed")), None):
        before, after = mixed["mixed"]
        first = say("fail", f"Outputs of shape {tuple(before)} are viewed as {tuple(after)}{at(mixed, 'line')}: each row holds one class in several places, not the {after[1]} classes of one place.",
                    advice=["Move the classes to the end first: outputs.movedim(1, -1).reshape(-1, classes); or give cross_entropy the outputs as they are, and targets without the axis of classes."])  # fmt: skip
    elif answers.get("others"):
        first = say("fail", f"The output that is compared with a target comes from another sequence{at(answers, 'line')}: outputs and targets are flattened in different orders.",
                    advice=["Bring both into one order before they are flattened: outputs (length, batch, classes) belong to targets (length, batch). Use transpose, not view or reshape."])  # fmt: skip
    say = partial(LOSS_CODES.finding, "loss.double_softmax", evidence={"calls": dict(facts)})
    if not any(name in facts for name in _OF_CLASSES):
        return [first, say("ok", "Does not apply: no loss over classes was seen.")]
    second = say("ok", "Every loss function gets the kind of input that it expects.")
    if swapped := next((each for each in facts.items() if each[1].get("swapped")), None):
        name, row = swapped
        return [first, say("fail", f"{name} is given targets in the place of outputs, and outputs as its targets{at(row, 'line')}: its loss is linear in them, and least at no probability between 0 and 1.",
                           advice=[f"Change their places: {name}(outputs, targets)."])]  # fmt: skip
    if several := next((each for each in facts.items() if each[1].get("several")), None):
        name, row = several
        shares = name == "cross_entropy"
        takes = (
            "takes one class, or shares that sum to 1,"
            if shares
            else "gets probabilities that sum to 1 over the classes"
        )
        return [first, say("warn" if shares else "fail", f"{name} {takes} and some targets are several classes{at(row, 'line')}: classes that an example has together exclude each other.", advice=[
            "Give the logits of the last layer to binary_cross_entropy_with_logits, without a softmax" + (". Where targets are counts of a multinomial, divide them by their sum." if shares else "."),
        ])]  # fmt: skip
    if double:
        name, row = double[0]
        lowest, sigmoid = _lowest(name, row), name == "binary_cross_entropy_with_logits"
        place = at(row, "line", also={"sigmoid" if sigmoid else "softmax": "made"})
        say = partial(say, value=lowest, unit="least loss of an example")
        floor = "" if lowest is None else f" No example can have a loss below {lowest:.3f}, class weights aside."
        if sigmoid:
            return [first, say("fail", f"{name} takes logits and gets values in [0, 1] alone{place}: they look like probabilities.{floor}", advice=[
                "Leave the sigmoid out of the model, or use binary_cross_entropy.",
            ])]  # fmt: skip
        takes = "logits" if name == "cross_entropy" else "logarithms of probabilities"
        fix, so = "Leave the softmax out of the model, or give log_softmax to nll_loss.", "the loss cannot fall far"
        if name == "kl_div":
            fix, so = (
                "Give log_softmax to kl_div.",
                "the loss is not least where both distributions agree, and falls below 0",
            )
        second = say("fail", f"{name} takes {takes} and gets probabilities{place}: they lie in [0, 1] and sum to 1 in every row, so {so}.{floor}", advice=[fix])  # fmt: skip
    return [first, second]
