"""Findings about the order of a loop's calls: zeroing, backward passes, clipping, steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from workbench.findings.finding import Codes, Finding

ORDER_CODES = Codes({
    "loop.no_zero_grad": "F1.1", "loop.zeroed_before_step": "F1.1", "loop.no_step": "F1.1", "loop.repeated_step": "F1.1",
    "loop.accumulation_scale": "F1.1", "clipping.after_step": "F4.6", "clipping.before_unscale": "F4.6",
})  # fmt: skip
Facts = Mapping[str, Any]
Say = Callable[..., Finding]


def _where(lines: Mapping[str, str], *tokens: str) -> str:
    line = next((lines[token] for token in tokens if lines.get(token)), "")
    return f" ({line})" if line else ""


def order_findings(facts: Facts, *, least_updates: int, share: float = 0.5) -> list[Finding]:
    """Return the findings of `ORDER_CODES`; `share` of the updates must show a fault (rule of thumb: loops have first and last steps)."""
    order = facts["order"]
    lines, optimizers = order["lines"], order["optimizers"]
    first = optimizers.get("0")
    if first is None:
        count = order["backwards"]
        missing = ORDER_CODES.finding(
            "loop.no_step", "fail", f"{count} backward passes and no step of an optimizer{_where(lines, 'backward')}: nothing is trained.",
            advice=["Call optimizer.step() after loss.backward()."],
        )  # fmt: skip
        rest = [code for code in ORDER_CODES if code != "loop.no_step"]
        return [missing, *(ORDER_CODES.not_measured(code, "no update was made") for code in rest)]
    if facts["updates"] < least_updates:
        reason = f"{facts['updates']} updates were seen, {least_updates} are needed"
        return [ORDER_CODES.not_measured(code, reason) for code in ORDER_CODES]
    orders = {tuple(text.split()): count for text, count in order["orders"].items()}
    usual = max(orders, key=lambda key: orders[key])
    evidence = {"order": " ".join(usual), "lines": dict(lines)}
    return [
        _kept(first, lines, evidence, share), _zeroed(first, orders, lines, evidence, share),
        ORDER_CODES.finding("loop.no_step", "ok", "The optimizer steps.", evidence=evidence),
        _repeated(optimizers, lines, evidence, share), _accumulation(first, lines, evidence),
        *_clipping(orders, lines, evidence, share),
    ]  # fmt: skip


def _kept(first: Facts, lines: Mapping[str, str], evidence: Facts, share: float) -> Finding:
    part = first["kept"] / max(first["steps"] - 2, 1)
    say: Say = partial(
        ORDER_CODES.finding,
        "loop.no_zero_grad",
        value=part,
        unit="share of updates",
        threshold=share,
        evidence=evidence,
    )
    if part <= share:
        return say("ok", "Gradients are zeroed between updates.")
    return say(
        "fail", f"Gradients are kept from one update to the next in {part:.0%} of the updates{_where(lines, 'backward')}: each update adds up all before it.",
        advice=["Call optimizer.zero_grad() once an update, before loss.backward()."],
    )  # fmt: skip


def _zeroed(
    first: Facts, orders: Mapping[tuple[str, ...], int], lines: Mapping[str, str], evidence: Facts, share: float
) -> Finding:
    def after(tokens: tuple[str, ...]) -> bool:
        plain = [token.strip("()").partition("*")[0].strip(")") for token in tokens]
        zeros = [i for i, token in enumerate(plain) if token in ("zero", "zero0")]
        passes = [i for i, token in enumerate(plain) if token == "backward"]
        return bool(zeros and passes and zeros[-1] > passes[-1])

    total = sum(orders.values())
    part = max(
        sum(count for tokens, count in orders.items() if after(tokens)) / total, first["empty"] / max(first["steps"], 1)
    )
    say: Say = partial(
        ORDER_CODES.finding,
        "loop.zeroed_before_step",
        value=part,
        unit="share of updates",
        threshold=share,
        evidence=evidence,
    )
    if part <= share or (not first["empty"] and not any(after(tokens) for tokens in orders)):
        return say("ok", "Gradients reach the step.")
    return say(
        "fail", f"Gradients are zeroed between backward and step in {part:.0%} of the updates{_where(lines, 'zero0', 'zero', 'step0')}: nothing is learned from them.",
        advice=["Zero gradients before loss.backward(), or after optimizer.step()."],
    )  # fmt: skip


def _repeated(optimizers: Facts, lines: Mapping[str, str], evidence: Facts, share: float) -> Finding:
    parts = {number: row["repeated"] / max(row["steps"] - 1, 1) for number, row in optimizers.items()}
    number = max(parts, key=lambda key: parts[key])
    say: Say = partial(
        ORDER_CODES.finding, "loop.repeated_step", value=parts[number], unit="share of steps", evidence=evidence
    )
    if parts[number] < share / 2:
        return say("ok", "Every step has a backward pass of its own.")
    return say(
        "fail", f"{parts[number]:.0%} of the optimizer's steps follow another one without a backward pass between them{_where(lines, f'step{number}')}: "
        "the same gradient is used twice.", advice=["Call optimizer.step() once an update."],
    )  # fmt: skip


def _accumulation(first: Facts, lines: Mapping[str, str], evidence: Facts) -> Finding:
    """Several draws and backward passes an update, whose losses are added and not averaged."""
    code = "loop.accumulation_scale"
    say: Say = partial(ORDER_CODES.finding, code)
    windows = {tuple(int(n) for n in key.split()): count for key, count in first["windows"].items()}
    usual = max(windows, key=lambda key: windows[key], default=(1, 1, 1))
    passes, draws, forwards = usual
    if passes < 2 or (draws or forwards) < passes or draws > passes:
        return say(
            "ok", "Does not apply: one backward pass an update, or several losses of one batch.", evidence=evidence
        )
    sums = {key.split()[0]: float(key.split()[1]) for key in first["factors"]}
    total = sums.get(str(passes))
    evidence = {**evidence, "passes": passes, "sum_of_factors": total}
    if total is None:
        return ORDER_CODES.not_measured(code, "the loss's graph does not show by what it is divided", evidence=evidence)
    short = {p: c for (p, _, _), c in windows.items() if p < passes}
    if total > 0.75 * passes:
        return say(
            "warn", f"{passes} backward passes an update, each with its whole loss{_where(lines, 'backward')}: the gradient is {passes} times the one of their mean, "
            f"and the learning rate in effect {passes} times as large.", value=total, unit="times the mean", threshold=1.0, evidence=evidence,
            advice=[f"Divide the loss by the number of passes, loss / {passes}, before backward()."],
        )  # fmt: skip
    partial_sums = [float(sums[str(p)]) for p in short if str(p) in sums]
    averaged = abs(total - 1.0) < 0.25  # else it is divided by something else, as by the tokens of the whole window
    if averaged and partial_sums and min(partial_sums) < 0.75:
        return say(
            "warn", f"Some updates are made after {min(short)} passes instead of {passes}, with losses divided by {passes} all the same{_where(lines, 'step0')}: their gradient "
            "is too small.", value=min(partial_sums), unit="times the mean", threshold=1.0, evidence=evidence,
            advice=["Divide by the number of passes that the update really has, or leave the last, partial window out."],
        )  # fmt: skip
    return say(
        "ok",
        f"{passes} backward passes an update, their losses averaged.",
        value=total,
        unit="times the mean",
        evidence=evidence,
    )


def _clipping(
    orders: Mapping[tuple[str, ...], int], lines: Mapping[str, str], evidence: Facts, share: float
) -> list[Finding]:
    total = sum(orders.values())
    plain = {
        tuple(t.strip("()").partition("*")[0].strip(")") for t in tokens): count for tokens, count in orders.items()
    }
    used = [tokens for tokens in plain if {"clip", "clip_value"} & set(tokens)]
    late = (
        sum(
            count
            for tokens, count in plain.items()
            if _first(tokens, "clip", "clip_value") < _first(tokens, "backward")
        )
        / total
    )
    scaled = (
        sum(
            count
            for tokens, count in plain.items()
            if "scale" in tokens and _first(tokens, "clip", "clip_value") < _first(tokens, "unscale")
        )
        / total
    )
    say: Say = partial(ORDER_CODES.finding, "clipping.after_step", evidence=evidence)
    where = _where(lines, "clip", "clip_value")
    if not used:
        after = say("ok", "Does not apply: gradients are not clipped by torch's functions.")
    elif late > share:
        after = say("fail", f"Gradients are clipped after the step in {late:.0%} of the updates{where}: the clipping changes nothing.", value=late,
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
