"""Findings about the order of a loop's calls: zeroing, backward passes, clipping, steps."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from workbench.findings.finding import Codes, Finding, named
from workbench.programs.own_config import clips_late, plain_call
from workbench.topics.loop.known import at, where_known

ORDER_CODES = Codes({
    "loop.no_zero_grad": "F1.1", "loop.zeroed_before_step": "F1.1", "loop.no_step": "F1.1", "loop.repeated_step": "F1.1",
    "loop.accumulation_scale": "F1.1", "loop.second_training": "F1.1", "clipping.after_step": "F4.6", "clipping.before_unscale": "F4.6",
})  # fmt: skip
Facts = Mapping[str, Any]
Say = Callable[..., Finding]


def order_findings(facts: Facts, *, least_updates: int, share: float = 0.5) -> list[Finding]:
    """Return the findings of `ORDER_CODES`; `share` of the updates must show a fault (rule of thumb: loops have first and last steps)."""
    order = facts["order"]
    lines, optimizers = order["lines"], order["optimizers"]
    first = optimizers.get("0")
    if first is None or not facts["updates"]:
        rest = [code for code in ORDER_CODES if code != "loop.no_step"]
        return [_no_step(facts), *(ORDER_CODES.not_measured(code, "no update was made") for code in rest)]
    if facts["updates"] < least_updates:
        reason = f"it takes {least_updates} updates, and the run has {facts['updates']}"
        return [ORDER_CODES.not_measured(code, reason) for code in ORDER_CODES]
    orders = {tuple(text.split()): count for text, count in order["orders"].items()}
    usual = max(orders, key=lambda key: orders[key])
    evidence = {"order": " ".join(usual), "lines": dict(lines)}
    return [
        _mixed(order, evidence, share) or _kept(optimizers, evidence, share), _zeroed(orders, facts, evidence, share), _no_step(facts),
        _repeated(optimizers, lines, evidence, share), *where_known(ORDER_CODES, ["loop.second_training"], lambda: _second(facts, least_updates)), _accumulation(first, lines, evidence),
        *_clipping(orders, lines, evidence, share),
    ]  # fmt: skip


def _no_step(facts: Facts) -> Finding:
    order, given = facts["order"], facts.get("optimizers_given") or 1
    stepped = len(order["optimizers"])
    say: Say = partial(
        ORDER_CODES.finding, "loop.no_step", value=float(stepped), unit="optimizers", threshold=float(given)
    )
    if stepped >= given and facts["updates"]:
        return say("ok", "The optimizer steps." if given == 1 else "All optimizers step.")
    others, backwards = facts.get("strangers", {}), f"{order['backwards']} backward passes"
    none, whose = "no step of the optimizer given to wb.watch", "its parameters"
    if given > 1:
        none, whose = (
            f"steps of {stepped or 'none'} of the {given} optimizers given to wb.watch",
            "the parameters of the others",
        )
    if "same" in others:
        return say(
            "warn", f"{backwards}, and {none}: another optimizer steps on the same parameters ({others['same']['line']}).",
            advice=["Give wb.watch the optimizer that steps: what it does to the parameters was not looked at."],
        )  # fmt: skip
    apart = f"another optimizer steps on other parameters ({others['others']['line']})" if others else ""
    if apart and not facts["reached"]:
        return say(
            "warn", f"{backwards}, and none of the first ones goes through the parameters given to wb.watch: {apart}.",
            advice=["Give wb.watch the model and the optimizer that train: what they do was not looked at."],
        )  # fmt: skip
    return say(
        "fail", f"{backwards}, and {none}{at(order['lines'], 'backward')}: {whose} are not trained{f'; {apart}' * bool(apart)}.",
        advice=["Call optimizer.step() after loss.backward()."],
    )  # fmt: skip


def _second(facts: Facts, least: int) -> Finding:
    optimizers = facts["order"]["optimizers"]
    first = optimizers["0"]["steps"]
    begun = [key for key, row in optimizers.items() if key != "0" and row["begun"] >= first and row["steps"] >= least]
    owners = facts["parameters"]["optimizers"]
    again = [key for key in begun if owners[key]["shared"]]
    later = [optimizers[key] for key in begun if key not in again]
    say: Say = partial(ORDER_CODES.finding, "loop.second_training", value=float(len(later)), unit="optimizers")
    if judged := facts.get("judged"):
        return say("ok", f"J{judged['said'][1:]}; the others are left as they are.")
    if (same := facts.get("strangers", {}).get("same")) and same["in_a_row"] >= least:
        return ORDER_CODES.not_measured(
            "loop.second_training", f"another optimizer made {same['steps']:,} more steps on the same parameters ({same['line']}), which were not looked at: give wb.watch both, as a list",
            value=1.0, unit="optimizers",
        )  # fmt: skip
    if not later and again:
        made = optimizers[again[0]]["steps"]
        return say(
            "ok", f"After the {first:,} updates of the first optimizer another one goes on with the same parameters; its {made:,} updates have no rows of their own."
        )  # fmt: skip
    if not later:
        return say("ok", "No optimizer begins after another one's last step.")
    return ORDER_CODES.not_measured(
        "loop.second_training", f"after the {first:,} updates of the first optimizer another one makes {later[0]['steps']:,}{at({'': later[0]['line']}, '')}: a separate "
        "training, which is not recorded. These findings are about the first; run or watch one training at a time to judge the other", value=float(len(later)), unit="optimizers",
    )  # fmt: skip


def _mixed(order: Facts, evidence: Facts, share: float, *, least: int = 3) -> Finding | None:
    """Return a warning where an optimizer steps on what another one's loss has left, in this share of `least` updates or more (rule of thumb); None where none does."""
    for number, alone, mixed in order.get("mixed", ()):
        if mixed >= least and mixed > share * alone:
            line = at({"": order["optimizers"][str(number)]["line"]}, "")
            return ORDER_CODES.finding(
                "loop.no_zero_grad", "warn", f"Optimizer {number + 1} steps on the gradients of two losses{line}: the one that was run backward for it, and an earlier one that another optimizer had stepped on, which reaches its parameters, too.",
                value=mixed / alone, unit="share of updates", threshold=share, evidence=evidence,
                advice=["Detach what the earlier loss is not to train, such as discriminator(fake.detach()), or zero these gradients before the second backward pass. Where both losses are meant, run both backward before either step."],
            )  # fmt: skip
    return None


def _kept(optimizers: Facts, evidence: Facts, share: float) -> Finding:
    part, line = max((row["kept"] / max(row["steps"] - 2, 1), row["line"]) for row in optimizers.values())
    say: Say = partial(ORDER_CODES.finding, "loop.no_zero_grad", evidence=evidence)
    say = partial(say, value=part, unit="share of updates", threshold=share)
    if part <= share:
        return say("ok", "Gradients are zeroed between updates.")
    return say(
        "fail", f"Gradients are kept from one update to the next in {part:.0%} of the updates{at({'backward': line}, 'backward')}: each update adds up all before it.",
        advice=["Call optimizer.zero_grad() once an update, before loss.backward()."],
    )  # fmt: skip


def _zeroed(orders: Mapping[tuple[str, ...], int], facts: Facts, evidence: Facts, share: float) -> Finding:
    def after(tokens: tuple[str, ...]) -> bool:
        plain = [plain_call(token) for token in tokens]
        zeros = [i for i, token in enumerate(plain) if token in ("zero", "zero0")]
        passes = [i for i, token in enumerate(plain) if token == "backward"]
        return bool(zeros and passes and zeros[-1] > passes[-1])

    total = sum(orders.values())
    part = sum(count for tokens, count in orders.items() if after(tokens)) / total
    say: Say = partial(ORDER_CODES.finding, "loop.zeroed_before_step", evidence=evidence)
    say = partial(say, value=part, unit="share of updates", threshold=share)
    if part <= share:
        return _discarded(orders, facts, share, say)
    return say(
        "fail", f"Gradients are zeroed between backward and step in {part:.0%} of the updates{at(facts['order']['lines'], 'zeroed late', 'step0')}: nothing is learned from them.",
        advice=["Zero gradients before loss.backward(), or after optimizer.step()."],
    )  # fmt: skip


def _discarded(
    orders: Mapping[tuple[str, ...], int], facts: Facts, share: float, say: Say, *, least: int = 3
) -> Finding:
    """Say whether passes of an update are in vain; of two the first may be meant so, to find where to take the second, but then no parameter has its gradient from that alone.

    Args:
        least: passes an update, all made in one line (rule of thumb: SAM makes two).
    """
    lines, first = facts["order"]["lines"], facts["order"]["optimizers"]["0"]
    wiped = facts["parameters"].get("wiped", [])
    lost: Counter[int] = Counter()
    between = 0
    for tokens, count in orders.items():
        calls = [
            token for token in _unfolded(tokens) if token in ("zero", "zero0", "backward") or token.startswith("step")
        ]
        passes = calls.count("backward")
        zeroed = sum(a == "backward" and b in ("zero", "zero0") for a, b in itertools.pairwise(calls))
        between += count * (zeroed > 0)
        if passes >= least and zeroed == passes - 1 and all(c == "step0" for c in calls if c.startswith("step")):
            lost[passes] += count
    one_line = all(int(key.split()[3]) == 1 for key in first["windows"])
    part, between_part = (count / sum(orders.values()) for count in (sum(lost.values()), between))
    advice = ["Zero gradients once an update: before the first of its backward passes, or after optimizer.step()."]
    if wiped and between_part > share:
        return say(
            "fail", f"Gradients are zeroed between two backward passes of an update{at(lines, 'zeroed between', 'zero0', 'zero')}: {named(wiped)} "
            "have one from the first alone, and none in any step.", value=between_part, advice=advice,
        )  # fmt: skip
    if part <= share or not one_line or first["altered"] * 2 > first["steps"]:
        return say("ok", "Gradients are present when the optimizer steps.")
    passes = max(lost, key=lambda key: lost[key])
    return say(
        "fail", f"Of {passes} backward passes an update the last one alone counts: gradients are zeroed before each of them{at(lines, 'zero0', 'zero')}.",
        value=part, advice=advice,
    )  # fmt: skip


def _unfolded(tokens: tuple[str, ...]) -> list[str]:
    """Return calls one by one, what is repeated as often as it is made."""
    text = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: " ".join([m[1]] * int(m[2])), " ".join(tokens))
    return re.sub(r"(\S+)\*(\d+)", lambda m: " ".join([m[1]] * int(m[2])), text).split()


def _repeated(optimizers: Facts, lines: Mapping[str, str], evidence: Facts, share: float) -> Finding:
    parts = {number: row["repeated"] / max(row["steps"] - 1, 1) for number, row in optimizers.items()}
    number = max(parts, key=lambda key: parts[key])
    say: Say = partial(
        ORDER_CODES.finding, "loop.repeated_step", value=parts[number], unit="share of steps", evidence=evidence
    )
    if parts[number] < share / 2:
        return say("ok", "Every step has a backward pass of its own.")
    return say(
        "fail", f"{parts[number]:.0%} of the optimizer's steps follow another one without a backward pass between them{at(lines, f'step{number}')}: "
        "the same gradient is used twice.", advice=["Call optimizer.step() once an update."],
    )  # fmt: skip


def _accumulation(first: Facts, lines: Mapping[str, str], evidence: Facts) -> Finding:
    """Several draws and backward passes an update, whose losses are added and not averaged."""
    code = "loop.accumulation_scale"
    say: Say = partial(ORDER_CODES.finding, code)
    windows = {tuple(int(n) for n in key.split()): count for key, count in first["windows"].items()}
    passes, draws, forwards, sites = max(windows, key=lambda key: windows[key], default=(1, 1, 1, 1))
    if passes < 2 or (draws or forwards) < passes or draws > passes or sites > 1:
        return say(
            "ok", "Does not apply: one backward pass an update, or several losses in as many lines.", evidence=evidence
        )
    if first["altered"] * 2 > first["steps"]:
        changed = "gradients are changed between the last backward pass and the step, perhaps divided"
        return ORDER_CODES.not_measured(code, changed, evidence=evidence)
    sums = {key.split()[0]: float(key.split()[1]) for key in first["factors"]}
    total = sums.get(str(passes))
    evidence = {**evidence, "passes": passes, "sum_of_factors": total}
    if total is None:
        return ORDER_CODES.not_measured(code, "the loss's graph does not show by what it is divided", evidence=evidence)
    short = {key[0]: c for key, c in windows.items() if key[0] < passes}
    if total > 0.75 * passes:
        return say(
            "warn", f"{passes} backward passes an update, each with its whole loss{at(lines, 'backward')}: the gradient is {passes} times the one of their mean, "
            f"and the learning rate in effect {passes} times as large.", value=total, unit="times the mean", threshold=1.0, evidence=evidence,
            advice=[f"Divide the loss by the number of passes, loss / {passes}, before backward()."],
        )  # fmt: skip
    partial_sums = [float(sums[str(p)]) for p in short if str(p) in sums]
    averaged = abs(total - 1.0) < 0.25  # else it is divided by something else, as by the tokens of the whole window
    if averaged and partial_sums and min(partial_sums) < 0.75:
        return say(
            "warn", f"Some updates are made after {min(short)} passes instead of {passes}, with losses divided by {passes} all the same{at(lines, 'step0')}: their gradient "
            "is too small.", value=min(partial_sums), unit="times the mean", threshold=1.0, evidence=evidence,
            advice=["Divide by the number of passes that the update really has, or leave the last, partial window out."],
        )  # fmt: skip
    return say(
        "ok",
        f"{passes} backward passes an update, each of a share of the loss.",
        value=total,
        unit="times the mean",
        evidence=evidence,
    )


def _clipping(
    orders: Mapping[tuple[str, ...], int], lines: Mapping[str, str], evidence: Facts, share: float
) -> list[Finding]:
    total = sum(orders.values())
    plain: Counter[tuple[str, ...]] = Counter()
    for tokens, count in orders.items():
        plain[tuple(plain_call(t) for t in tokens)] += count
    clips = ("clip", "clip_value")
    used = [tokens for tokens in plain if set(clips) & set(tokens)]

    def part(wrong: Callable[[tuple[str, ...]], bool]) -> float:
        return sum(count for tokens, count in plain.items() if wrong(tokens)) / total

    def still_scaled(tokens: tuple[str, ...]) -> bool:
        since = tokens[_first(tokens, "scale") :]  # what is before belongs to a second optimizer's last step
        return bool(since) and _first(since, *clips) < _first(since, "unscale")

    late, scaled = part(clips_late), part(still_scaled)
    early = part(lambda tokens: clips_late(tokens) and "forward" in tokens[: _first(tokens, *clips)])
    when = "before the backward pass" if 2 * early > late else "after the step"
    say: Say = partial(ORDER_CODES.finding, "clipping.after_step", evidence=evidence)
    where = at(lines, "clip", "clip_value")
    if not used:
        after = say("ok", "Does not apply: gradients are not clipped by torch's functions.")
    elif late > share:
        after = say("fail", f"Gradients are clipped {when} in {late:.0%} of the updates{where}: the clipping changes nothing.", value=late,
                    unit="share of updates", threshold=share, advice=["Clip between loss.backward() and optimizer.step()."])  # fmt: skip
    else:
        after = say("ok", "Gradients are clipped between backward and step.", value=late)
    say = partial(ORDER_CODES.finding, "clipping.before_unscale", evidence=evidence)
    if not any("scale" in tokens for tokens in plain) or not used:
        unscaled = say("ok", "Does not apply: no loss is scaled and clipped.")
    elif scaled > share:
        unscaled = say("fail", f"Gradients are clipped while they are still scaled in {scaled:.0%} of the updates{where}: the threshold means something else at every scale.",
                       value=scaled, unit="share of updates", threshold=share, advice=["Call scaler.unscale_(optimizer) before clip_grad_norm_."])  # fmt: skip
    else:
        unscaled = say("ok", "Gradients are unscaled before they are clipped.", value=scaled)
    return [after, unscaled]


def _first(tokens: tuple[str, ...], *wanted: str) -> int:
    return next((i for i, token in enumerate(tokens) if token in wanted), len(tokens))
