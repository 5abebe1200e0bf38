"""Findings about updates that do not reach what they are to change: parameters that stay, are written over or set back, or are not what is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pandas as pd

from workbench.curves.trial_curves import RecordLike
from workbench.findings.finding import Codes, Finding, named
from workbench.topics.loop.known import at, rows_of

UPDATE_CODES = Codes({"loop.no_update": "F1.1", "loop.restores_nothing": "F1.1"})
Facts = Mapping[str, Any]
Say = Callable[..., Finding]


def unchanged(facts: Facts) -> list[str]:
    """Return the parameters that no update changed; a bias before a norm has no gradient by nature, so that few biases alone are none."""
    names: list[str] = facts["still"]
    return [] if all(name.endswith("bias") for name in names) and len(names) * 3 <= facts["owned"] else names


def not_evaluated(
    record: RecordLike, facts: Facts, *, least: int = 5, learns: float = 0.9, well: float = 0.5, little: float = 0.05
) -> Finding | None:
    """Return a failure where an evaluated loss stays the same `least` times or more while that of training falls below `learns` times its first (rules of thumb), and no evaluation of a model that trains was seen; else None.

    A warning where the evaluated one stays in the upper half of what that of training falls, to below `well` times its first, and changes by at most
    `little` of it (rules of thumb).
    """
    steps, evals = rows_of(record), record.evals
    losses = steps.get("loss")
    seen = any(m["trained"] and m["runs"] for m in facts["modes"]["models"])
    if losses is None or losses.empty or seen:
        return None
    held = list[float]()
    if "metric" in evals:
        mine = evals[evals["trial"] == steps["trial"].iloc[0]] if "trial" in steps else evals
        held = mine["value"][(mine["metric"] == "loss") & (mine["split"] != "train")].tolist()
    logged = bool(held)
    if not logged and (watched := facts["data"].get("trained", {}).get("losses")):
        held = pd.DataFrame(watched).groupby(0)[1].mean().tolist()
    part = max(len(losses) // 10, 1)
    first, last = losses.iloc[:part].median(), losses.iloc[-part:].median()
    if len(held) < least or not held[0] > 0 or not last < learns * first:
        return None
    moved = max(held) - min(held)
    start = float(losses.iloc[0])
    stays = 2 * min(held) >= start + last and moved <= little * (start - last)
    if moved > 0 and stays and last < well * first:
        return UPDATE_CODES.finding(
            "loop.no_update", "warn", f"The evaluated loss moves from {held[0]:.4g} to {held[-1]:.4g} in {len(held)} evaluations, while that of training falls from {start:.3g} to {last:.3g}: "
            "updates hardly reach the model that is evaluated, which is not the one that trains.", value=moved / (start - last), unit="share", threshold=little,
            advice=["Where it averages the weights of the other, take a smaller decay, or one that grows, min(decay, (1 + k) / (10 + k)) after k updates: an average with decay 0.9999 needs some 10,000 updates to forget its first weights."],
        )  # fmt: skip
    if moved > 0 or not logged:
        return None
    return UPDATE_CODES.finding(
        "loop.no_update", "fail", f"The evaluated loss is {held[0]:.4g} in all {len(held)} evaluations, to the last digit, while that of training falls from {first:.3g} to {last:.3g}: "
        "no update reaches the model that is evaluated.", value=float(len(held)), unit="evaluations",
        advice=["Evaluate the model that is trained. Where a copy averages its weights, look at which of the two is written: the copy moves to the model, copy.lerp_(model, 1 - decay)."],
    )  # fmt: skip


def updates_lost(facts: Facts, still: list[str], least_lr: float, *, none: bool, rounded: float = 0.8) -> Finding:
    """Judge the parameters that no update changes, and what is written over their updates; `none` of them has a gradient, which is told elsewhere.

    Of numbers of 16 bits, `rounded` may be left by an update as they were (rule of thumb: digits in bfloat16 leave 0.1 to 0.4 at an accuracy of 0.92, and 0.84 at 0.15).
    """
    say: Say = partial(UPDATE_CODES.finding, "loop.no_update", value=float(len(still)), unit="parameters", evidence={"names": still})  # fmt: skip
    update = say("ok", "Every parameter that was looked at is changed by its updates.")
    if (lost := _overwritten(facts.get("kept"))) is not None:
        return lost
    swallowed = facts.get("swallowed") or 0.0
    if swallowed > rounded and facts["moves"] >= 2:
        return say(
            "fail", f"An update leaves {swallowed:.0%} of the numbers that have a gradient as they were: the weights have 16 bits, and what is less than half the distance to the next such number is rounded away.",
            value=swallowed, unit="share of numbers", threshold=rounded, evidence={}, advice=["Keep the weights in float32, and compute in 16 bits: torch.autocast."],
        )  # fmt: skip
    if facts["moves"] < 2:
        few = f"it takes 2 updates that are looked at before and after, and the run has {facts['moves']}"
        update = UPDATE_CODES.not_measured("loop.no_update", few)
    elif still and facts.get("moved_at", 1.0) < least_lr:  # of a warmup in epochs: rounding swallows such updates
        small = f"the updates that were looked at have {facts['moved_at']:.2g} times the largest learning rate"
        update = UPDATE_CODES.not_measured("loop.no_update", small)
    elif still and not none:
        turned = all(name.endswith("_reverse") for name in still)
        update = say("fail" if len(still) * 2 > facts["owned"] else "warn", f"No update that was looked at changes {named(still)}.", advice=[
            "Take the reverse direction's output at the first step, or h_n: at the last step it has seen one input and no state, so that its recurrent weights have a gradient of 0."
            if turned else
            "Look for a learning rate of 0 in their group, a gradient of exactly 0, or values that are restored after the step.",
        ])  # fmt: skip
    return update


def restored(kept: Facts, *, loads: int = 4) -> Finding:
    """Judge whether weights that are loaded into the model are others than its own; fewer than `loads` times they may be, as where the last ones are the best (rule of thumb)."""
    say: Say = partial(UPDATE_CODES.finding, "loop.restores_nothing", evidence=dict(kept))
    by_line: dict[str, list[bool]] = {}
    for line, same in kept.get("equal") or ():
        by_line.setdefault(line, []).append(same)
    line, count = next(
        ((line, len(each)) for line, each in by_line.items() if len(each) >= loads and all(each)), ("", 0)
    )
    if count and not kept.get("own"):
        return say(
            "warn", f"All {count} times that weights are loaded into the model{at({'line': line}, 'line')} they are those that it has: state dicts that are kept without a copy are the same tensors, and so is their average.",
            advice=["Keep a copy of each, copy.deepcopy(model.state_dict())."],
        )  # fmt: skip
    if not kept.get("own"):
        return say("ok", "The model was never given its own tensors to load.")
    return say(
        "warn", f"The weights that are loaded into the model{at(kept, 'own')} are its own parameters, and nothing is restored: state_dict() refers to them, and they were trained on.",
        advice=["Keep a copy, copy.deepcopy(model.state_dict()), or save it to a file."],
    )  # fmt: skip


def _overwritten(
    kept: Facts | None, *, least: float = 0.01, share: float = 0.9, updates: int = 5, loads: int = 3, back: float = 0.95, pulls: int = 2,
) -> Finding | None:  # fmt: skip
    """Return a finding where at most `least` of the numbers keep their step, in this share of `updates` or more, or over all of `loads` loadings or more (rules of thumb).

    So it does where all numbers go back by one part of the way from their first values, of which `back` at most is left, `pulls` times and
    in the later half of the updates until the last look, too (rules of thumb: once does whatever keeps a copy of the weights that moves on).
    """
    if kept is None:
        return None
    say: Say = partial(
        UPDATE_CODES.finding, "loop.no_update", "fail", evidence=dict(kept), unit="share", threshold=least
    )
    each, loaded = ([x <= least for x in kept[name]] for name in ("updates", "loads"))
    if len(each) >= updates and sum(each) >= share * len(each):
        return say(
            f"Of each update nearly nothing is left when the next one begins: the weights are overwritten after the step{at(kept, 'line')}.", value=max(kept["updates"]),
            advice=["Keep an average of the weights in a copy of the model, and evaluate that; the model itself goes on from where its step led."],
        )  # fmt: skip
    if len(loaded) >= loads and all(loaded):
        return say(
            f"Weights are loaded into the model {len(loaded)} times in its training{at(kept, 'line')}, and nothing is left of the updates before.", value=max(kept["loads"]),
            advice=["Load the best weights once, after training; and look at when they count as the best."],
        )  # fmt: skip
    looks = kept.get("set_back", ())
    drawn = [update for update, left in looks if left <= back]
    if len(drawn) >= pulls and 2 * drawn[-1] > looks[-1][0]:
        return say(
            f"After {len(drawn)} of {len(looks)} updates that were looked at, all parameters are set back towards their first values, by the same part of the way: updates are undone.", value=min(left for _, left in looks),
            advice=["Look at what is copied into the parameters every few updates. Of two copies of the weights, as Lookahead has them, the slow one has to keep its own step towards the fast one."],
        )  # fmt: skip
    return None
