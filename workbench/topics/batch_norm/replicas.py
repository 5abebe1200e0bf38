"""Batch norm on several processes: whose examples make a statistic, and what running statistics and a checkpoint then hold (P6.3 to P6.8)."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.findings.finding import Codes, Finding, Status
from workbench.train.distributed.merge_statistics import MergedStatistics, merge_statistics

CODES = Codes({
    "batch_norm.rank_local": "P6.3", "batch_norm.first_device_ema": "P6.8", "batch_norm.variance_of_means": "P6.7",
    "batch_norm.ghost_size": "P6.6", "batch_norm.small_batch": "P6.2", "batch_norm.cold_ema": "P6.7", "batch_norm.stale": "P6.7",
})  # fmt: skip
_RANK_LOCAL, _FIRST_DEVICE, _VARIANCE = list(CODES)[:3]
EPS = 1e-5  # what batch norm adds to a variance, by torch's default: in a dead channel, smaller ones do not count
SAME = 1e-5  # standard deviations that rounding may account for: float32 buffers hold seven digits (rule of thumb)
_TOLD = {"merged": "merged", "average": "averaged"}
_NOT_FINITE = "running statistics of some process are not finite"
Floats = NDArray[np.float64]
_Layer = tuple[Floats, Floats]
_Row = Mapping[str, Any]


class Replicas(NamedTuple):
    """The running statistics of every process of a job."""

    processes: int
    layers: dict[str, _Layer]  # mean and variance of each layer, (processes, channels)
    merged: dict[str, MergedStatistics]  # the same of all processes together, by their weights
    # largest distance of two processes in a channel of each layer, in standard deviations; NaN where they are not
    # finite
    apart: dict[str, float]
    # how the checkpoint holds them, "merged" or as an "average"; None where neither, or there is none
    written: str | None
    finite: bool


def judge_processes(
    facts: Mapping[str, Any], devices: Sequence[_Row], *, harm: float, large_shift: float, missing_share: float
) -> tuple[Finding, Finding, Finding]:
    """Return `batch_norm.rank_local`, `.first_device_ema` and `.variance_of_means`; the thresholds are those of `diagnose_batch_norm`."""
    replicas, judged = _read_replicas(facts), partial(_harmful, facts, harm=harm, large_shift=large_shift)
    return (
        _simulated(facts, devices, harm) if replicas is None else _rank_local(facts, replicas, judged),
        _first_device_ema(facts, replicas, judged),
        _simulated_variance(facts, devices, missing_share) if replicas is None else _variance(replicas, missing_share),
    )


def _read_replicas(facts: Mapping[str, Any]) -> Replicas | None:
    """Return what the processes gave; None where nobody gave anything."""
    given = facts.get("replicas")
    if not given or not given["layers"]:
        return None
    layers = {name: _layer(each) for name, each in given["layers"].items()}
    apart = {name: largest_distance(*layer) for name, layer in layers.items()}
    merged = {name: merge_statistics(*layer, given.get("examples")) for name, layer in layers.items()}
    written, finite = None, bool(np.isfinite(list(apart.values())).all())
    if finite and facts.get("checkpoint") is not None:
        close = {
            "merged": _checkpoint_distance(facts, {n: (m.mean, m.variance) for n, m in merged.items()}),
            "average": _checkpoint_distance(facts, {n: (m.mean, m.average_variance) for n, m in merged.items()}),
        }
        best = min(close, key=lambda kind: close[kind])
        written = best if close[best] <= SAME else None
    return Replicas(int(given["count"]), layers, merged, apart, written, finite)


def _layer(each: _Row) -> _Layer:
    return np.array(each["mean"], dtype=np.float64), np.array(each["variance"], dtype=np.float64)


def largest_distance(mean: Floats, variance: Floats, of: Floats | None = None) -> float:
    """Return how far two statistics of a channel lie apart at most, in its standard deviations; NaN where one is not finite.

    Args:
        mean: shape (statistics, channels), as `variance`; what counts is the larger of the distances of means and of deviations.
        of: variance of each channel that makes the unit; None is that of all statistics together.
    """
    if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
        return math.nan
    sd = np.sqrt(np.maximum(merge_statistics(mean, variance).variance if of is None else of, EPS))
    ranges = [np.ptp(values, axis=0) / sd for values in (mean, np.sqrt(np.maximum(variance, 0.0)))]
    return float(np.max(ranges, initial=0.0))


def _checkpoint_distance(facts: Mapping[str, Any], other: Mapping[str, _Layer]) -> float:
    """Return how far the checkpoint lies from other statistics, in standard deviations of the latter."""
    found = [0.0]
    for name, values in facts["checkpoint"].items():
        (mean, variance), (their_mean, theirs) = _layer(values), other[name]
        found.append(largest_distance(np.stack([mean, their_mean]), np.stack([variance, theirs]), of=theirs))
    return float(np.max(found))


def _rank_local(facts: Mapping[str, Any], replicas: Replicas, judged: Callable[[float], tuple[Status, str]]) -> Finding:
    """Judge whether processes normalise with statistics of their own where a model is evaluated or written."""
    if not replicas.finite:
        return CODES.not_measured(_RANK_LOCAL, _NOT_FINITE)
    count, apart = replicas.processes, replicas.apart
    name, value = max(apart.items(), key=lambda pair: pair[1])
    found = partial(
        CODES.finding, _RANK_LOCAL, value=value, unit="standard deviations", threshold=SAME,
        evidence={"processes": count, "layer": name, "apart": apart, "metrics": facts["replicas"].get("metrics")},
    )  # fmt: skip
    if count < 2:
        return found("ok", "One process: there is no other to compare with.")
    if value <= SAME:
        return found("ok", f"The running statistics of {count} processes are equal.")
    said = (
        f"The running statistics of {count} processes lie up to {value:.3g} standard deviations apart (layer {name!r})"
    )
    if replicas.written is not None:
        return found("ok", f"{said}; the checkpoint holds them {_TOLD[replicas.written]}.")
    status, told = judged(value)
    return found(
        status, f"{said}: each evaluates a different model, and a checkpoint depends on who writes it.{told}",
        advice=["Call wb.batch_norm.merge_running_statistics(model) on every process before evaluating and before writing a checkpoint.",
                "Or train with statistics of all processes: model = wb.batch_norm.synchronise(model)."],
    )  # fmt: skip


def _harmful(facts: Mapping[str, Any], shift: float, *, harm: float, large_shift: float) -> tuple[Status, str]:
    """Return "fail" where the processes' metrics show harm, or nobody gave them and the distance is large; and what tells."""
    found = [float(value) for value in facts["replicas"].get("metrics") or ()]
    finite = [value for value in found if math.isfinite(value)]
    if not finite:
        ask = "Whether that does harm, the metric of each process shows: wb.batch_norm.audit(..., metrics=...)."
        return ("fail", "") if shift > large_shift else ("warn", f" {ask}")
    if len(finite) < len(found):
        return "fail", f" The metric of {len(found) - len(finite)} of {len(found)} is not finite."
    typical, span = abs(float(np.mean(finite))), max(finite) - min(finite)
    differs = span / typical if typical else math.inf if span else 0.0
    return "fail" if differs > harm else "warn", f" Their metrics differ by {differs:.2%}."


def _first_device_ema(
    facts: Mapping[str, Any], replicas: Replicas | None, judged: Callable[[float], tuple[Status, str]]
) -> Finding:
    """Judge whether a checkpoint, or a wrapper, keeps the running statistics of one process only."""
    code = _FIRST_DEVICE
    advice = ["Call wb.batch_norm.merge_running_statistics(model) on every process before the checkpoint is written, or train with "
              "wb.batch_norm.synchronise(model)."]  # fmt: skip
    if facts.get("copies_first"):
        return CODES.finding(
            code, "warn", "DistributedDataParallel copies the first process's running statistics over all others' at every forward "
            "pass, and batch norm is not synchronised: what the others saw is lost.",
            evidence={"copies_first": True}, advice=[*advice, "DistributedDataParallel(model, forward_sync_buffers=False), in older torch "
                                                        "broadcast_buffers=False, keeps each process's own."],
        )  # fmt: skip
    if replicas is None or facts.get("checkpoint") is None:
        if facts.get("step") is not None:
            return CODES.finding(code, "ok", "Trained by one process: its statistics are all there are.")
        return CODES.not_measured(code, "it takes a checkpoint and the running statistics of every process")
    if not replicas.finite:
        return CODES.not_measured(code, _NOT_FINITE)
    count = replicas.processes
    if count < 2 or max(replicas.apart.values()) <= SAME:
        said = "The processes' running statistics are equal: the checkpoint holds those of all."
        return CODES.finding(code, "ok", said)
    ranks = [{n: (m[rank], v[rank]) for n, (m, v) in replicas.layers.items()} for rank in range(count)]
    near = [_checkpoint_distance(facts, own) for own in ranks]
    numbers: dict[str, Any] = {
        "value": min(near), "unit": "standard deviations", "threshold": SAME,
        "evidence": {"distances": near, "written": replicas.written},
    }  # fmt: skip
    if replicas.written is not None:
        said = f"The checkpoint holds the running statistics of {count} processes {_TOLD[replicas.written]}."
        return CODES.finding(code, "ok", said, **numbers)
    if min(near) <= SAME:
        status, told = judged(max(near))
        return CODES.finding(
            code, status, f"The checkpoint holds the running statistics of process {int(np.argmin(near))} alone; those of the others lie up to "
            f"{max(near):.3g} standard deviations away.{told}", advice=advice, **numbers,
        )  # fmt: skip
    why = "the checkpoint's running statistics are neither those of a process nor theirs together: it was written at another step"
    return CODES.not_measured(code, why, **numbers)


def _variance(replicas: Replicas, share: float) -> Finding:
    """Judge whether the spread between the means of processes is missing from a variance."""
    if not replicas.finite:
        return CODES.not_measured(_VARIANCE, _NOT_FINITE)
    shares = {name: m.spread / np.maximum(m.variance, EPS) for name, m in replicas.merged.items()}
    missing = {name: float(np.max(each)) for name, each in shares.items()}
    name = max(missing, key=lambda n: missing[n])
    value, at, channel = missing[name], replicas.merged[name], int(np.argmax(shares[name]))
    truth, average = float(at.variance[channel]), float(at.average_variance[channel])
    found = partial(
        CODES.finding, _VARIANCE, value=value, unit="share", threshold=share,
        evidence={"layer": name, "channel": channel, "merged": truth, "average": average, "missing": missing},
    )  # fmt: skip
    said = f"Averaged over the processes, a variance is {average:.3g} where that of all their examples is {truth:.3g} (layer {name!r}, channel {channel})"
    if value <= share:
        return found("ok", f"{said}: the means lie close together.")
    if replicas.written == "merged":
        return found("ok", f"{said}; the checkpoint holds the latter.")
    if replicas.written == "average":
        advice = "Merge instead: wb.batch_norm.merge_running_statistics(model), or wb.batch_norm.merge_statistics(means, variances, counts)."
        return found("fail", f"{said}, and the checkpoint holds the average.", advice=[advice])
    advice = "Merge by the law of total variance: wb.batch_norm.merge_running_statistics(model)."
    return found("warn", f"{said}: an average leaves out how far the means lie apart.", advice=[advice])


def _simulated(facts: Mapping[str, Any], devices: Sequence[_Row], harm: float) -> Finding:
    several = _several(devices)
    if not several:
        if facts.get("step") is not None:
            return CODES.finding(
                _RANK_LOCAL, "ok", "Trained by one process: its batch norm has no other to compare with."
            )
        why = "the running statistics of all processes were not given; wb.batch_norm.gather_running_statistics(model) returns them"
        return CODES.not_measured(_RANK_LOCAL, why)
    worst = max(several, key=_loss_range)
    value = _loss_range(worst)
    numbers: dict[str, Any] = {
        "value": value, "unit": "share", "threshold": harm, "evidence": {"devices": list(devices)},
    }  # fmt: skip
    if not math.isfinite(value):
        return CODES.not_measured(_RANK_LOCAL, "a loss with a device's own statistics is not finite", **numbers)
    said = (
        f"On {worst['devices']} devices with {worst['examples']} examples each ({worst['shards']} shards), running statistics lie "
        f"{worst['apart']:.3g} standard deviations apart, and the validation loss differs by {value:.2%} with whose are used"
        f"{_sorted_too(devices, worst, _loss_range)}"
    )
    if value <= harm:
        return CODES.finding(_RANK_LOCAL, "ok", f"{said}: no more than {harm:.0%}.", **numbers)
    return CODES.finding(
        _RANK_LOCAL, "warn", f"{said}, by more than {harm:.0%}: unless they are synchronised, the result depends on the device that evaluates.",
        advice=["On several devices, call wb.batch_norm.merge_running_statistics(model) before evaluating and checkpointing, or train with "
                "wb.batch_norm.synchronise(model)."], **numbers,
    )  # fmt: skip


def _simulated_variance(facts: Mapping[str, Any], devices: Sequence[_Row], share: float) -> Finding:
    several = _several(devices)
    if not several:
        if facts.get("step") is not None:
            return CODES.finding(_VARIANCE, "ok", "Trained by one process: there are no other means to compare with.")
        return CODES.not_measured(_VARIANCE, "it takes the running statistics of every process")
    worst = max(several, key=lambda row: float(row["missing"]))
    value, losses = float(worst["missing"]), worst["losses"]
    said = (
        f"On {worst['devices']} devices ({worst['shards']} shards), averaging the running variances leaves out {value:.2%} of the "
        f"merged variance{_sorted_too(devices, worst, lambda row: float(row['missing']))}; the validation loss is {losses['average']:.4g} with the average, "
        f"{losses['merged']:.4g} merged, {losses['whole']:.4g} with the whole batch's."
    )
    advice = "Where shards differ, merge running statistics (wb.batch_norm.merge_running_statistics), or deal the examples out at random."
    status: Status = "ok" if value <= share else "warn"
    return CODES.finding(
        _VARIANCE, status, said, value=value, unit="share", threshold=share, evidence={"devices": list(devices)},
        advice=() if status == "ok" else [advice],
    )  # fmt: skip


def _several(devices: Sequence[_Row]) -> list[_Row]:
    """Return the rows of several devices; where examples were dealt out at random as well, sorted shards are told, not judged."""
    several = [row for row in devices if row["devices"] > 1]
    return [row for row in several if row["shards"] == "dealt"] or several


def _sorted_too(devices: Sequence[_Row], judged: _Row, of: Callable[[_Row], float]) -> str:
    """Tell the largest number of the shards that are not judged, as the end of a sentence."""
    others = [of(row) for row in devices if row["devices"] > 1 and row["shards"] != judged["shards"]]
    return f" (were the shards sorted by label: {max(others):.2%})" if others else ""


def _loss_range(row: _Row) -> float:
    """Return by which share the loss changes with the device whose statistics are used."""
    own = [float(v) for v in row["losses"]["own"]]
    return (max(own) - min(own)) / abs(float(row["losses"]["whole"])) if len(own) > 1 else 0.0
