"""With which update a rise of the loss begins: its learning rate, its batch, and whether the optimizer's second moment was up to its gradient."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.instability import Rise
from workbench.curves.trial_curves import TrialCurve

FloatArray = NDArray[np.float64]
_WITH_SECOND_MOMENT = ("adam", "adamw", "nadam")


def first_update(
    curve: TrialCurve, rise: Rise, facts: Mapping[str, Any], *, lr_jump: float = 1.5, norm_ratio: float = 5.0, loss_sds: float = 6.0,
    window: int = 50, slack: int = 5,
) -> dict[str, Any] | None:  # fmt: skip
    """Return what is known of the update that a rise begins with; None where no update around its onset stands out.

    Args:
        lr_jump: times that of the update before that makes a learning rate stand out.
        norm_ratio: times the median of the `window` updates before the onset that makes a gradient norm stand out.
        loss_sds: distance from their median, in their standard deviations, that makes a loss stand out (rules of thumb, all five).

    Returns:
        update; loss, grad_norm and lr with the medians before the onset; examples (indices of the loader's dataset, the first 256) of size;
        usual_size, of the loader's batches; short: whether this one has at most half as many examples (rule of thumb);
        batch, where no sampler told: shape and sum of its first values; second_moment_ratio: squared gradient over the optimizer's second moment before it, both
        summed over the parameters: about 1 in quiet training.
    """
    onset = curve.row(rise.onset_step)
    stop = onset + 2 if rise.peak_step is None else curve.row(rise.peak_step) + 1
    start = max(0, onset - slack)
    rows = range(max(start, 1), min(max(stop, onset + 2), curve.loss.size))
    before = slice(max(0, start - window), start)
    loss, norm, lr = curve.loss, curve.column("grad_norm"), curve.column("lr")
    usual = {
        "loss": _median(loss[before]),
        "grad_norm": _median(norm[:start][np.isfinite(norm[:start])][-window:]),
        "lr": _median(lr[before]),
    }
    noise = 1.4826 * _median(np.abs(loss[before] - usual["loss"]))
    noise = max(noise, 1e-3 * abs(usual["loss"]))
    for row in rows:
        out = loss[row] > usual["loss"] + loss_sds * noise or not math.isfinite(loss[row])
        if lr[row] >= lr_jump * lr[row - 1] > 0 or norm[row] >= norm_ratio * usual["grad_norm"] > 0 or out:
            break
    else:
        return None
    update = int(curve.at_steps[row])
    loop = facts.get("loop") or {}
    notes = {note["update"]: note for note in (loop.get("batches") or {}).get("updates", ())}
    found: dict[str, Any] = {"update": update}
    for name, values in (("loss", loss), ("grad_norm", norm), ("lr", lr)):
        found |= {name: float(values[row]), f"{name}_before": usual[name]}
    found |= {name: notes.get(update, {}).get(name) for name in ("examples", "size", "batch")}
    usual_size = (loop.get("loaders") or {}).get("batch_size")
    found |= {"usual_size": usual_size, "short": bool(found["size"] and usual_size and 2 * found["size"] <= usual_size)}
    return found | {"second_moment_ratio": _second_moment_ratio(curve, row, loop)}


def told(found: Mapping[str, Any], *, most: int = 8) -> str:
    """Return the update in a sentence, with `most` of its examples."""
    said = []
    for name, word in (("lr", "learning rate"), ("loss", "loss"), ("grad_norm", "gradient norm")):
        value, before = found[name], found[f"{name}_before"]
        if value > 1.5 * before:
            said.append(f"{word} {value:.3g}, {before:.3g} before")
    if found["short"]:
        said.append(
            f"a short batch, {found['size']} examples where others have {found['usual_size']}; drop_last=True of the DataLoader leaves it out"
        )
    elif found["examples"] is not None:
        shown = ", ".join(str(i) for i in found["examples"][:most])
        more = found["size"] - most
        said.append(f"examples {shown}{f' and {more} more' if more > 0 else ''}")
    elif found["batch"] is not None and found["batch"]["sum"] is not None:
        shape, total = tuple(found["batch"]["shape"]), found["batch"]["sum"]
        said.append(f"a batch of shape {shape} whose first 4,096 values sum to {total:.6g}")
    if (found["second_moment_ratio"] or 0.0) > 10.0:
        said.append(f"a squared gradient {found['second_moment_ratio']:.3g} times the optimizer's second moment")
    return f" It begins with update {found['update']}: {'; '.join(said)}." if said else ""


def told_course(rise: Rise, times: int) -> str:
    """Return how high the loss went and how soon it was back; `times` is how often that happened in the same run."""
    took = rise.steps_to_recover
    back = "not back yet" if took is None else f"back after {took:,} step{'' if took == 1 else 's'}"
    which = f", the first of {times}" if times > 1 else ""
    return f" (loss {rise.trough_loss:.3g} to {rise.peak_loss:.3g}, {back}{which})"


def told_replay(found: Mapping[str, Any], *, most: int = 3) -> str:
    """Return in a sentence what the replay of the update says, with `most` of its examples."""
    where = f" Replayed from step {found['started']}, {'bit for bit' if found['exact'] else 'to rounding'}: "
    batch, before, after = (found[name] for name in ("batch_before", "others_before", "others_after"))
    said = {"data": "the batch itself is to blame", "both": "the batch stands out, and so do others right before it",
            "state": "the state is to blame, not the batch", None: "nothing stands out"}  # fmt: skip
    told = f"{where}{said[found['cause']]}. Under the weights {found['back']} updates before, the loss of its batch is {batch:.3g} and that of others {before:.3g}"
    if found["cause"] in ("data", "both"):
        shown = zip(found["examples"][:most], found["example_losses"][:most], strict=True)
        return f"{told}; examples {', '.join(f'{i} ({loss:.3g})' for i, loss in shown)} have the largest."
    ratio = found["second_moment_ratio"]
    stale = f", and its squared gradient was {ratio:.3g} times the second moment" if ratio and ratio > 10 else ""
    ratio = found["update_ratio"]
    length = f"{ratio:.3g} times as long as usual" if math.isfinite(ratio) else "made after updates of length 0"
    return f"{told}; after it others have {after:.3g}. The update was {length}{stale}."


def _second_moment_ratio(curve: TrialCurve, row: int, loop: Mapping[str, Any]) -> float | None:
    """Follow the sum of Adam's second moment, which is a moving average of the squared gradient norms that the optimizer was given."""
    if curve.config.get("optimizer") not in _WITH_SECOND_MOMENT or row < 1:
        return None
    beta = float(curve.config.get("beta2", 0.999))
    norm = curve.column("grad_norm")[: row + 1]
    limits = [
        float(text.split()[1]) for text in ((loop.get("order") or {}).get("limits") or {}) if text.startswith("clip ")
    ]
    clipped = curve.column("clipped")[: row + 1] > 0
    if clipped.any() and len(limits) != 1:
        return None
    squares = np.where(clipped, limits[0] if limits else 0.0, norm) ** 2
    begun = (loop.get("batches") or {}).get("second_moment") or {"sum": 0.0, "steps": 0.0}
    moment, count = float(begun["sum"]), float(begun["steps"])
    known = np.flatnonzero(np.isfinite(squares[:-1]))
    for at, gap in zip(known, np.diff(known, append=row), strict=True):  # each stands for the updates up to the next
        left = beta ** float(gap)
        moment, count = left * moment + (1.0 - left) * float(squares[at]), count + gap
    if moment <= 0 or count < 1 or not math.isfinite(squares[-1]):
        return None
    return float(squares[-1] / (moment / (1.0 - beta**count)))


def _median(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size >= 5 else math.nan
