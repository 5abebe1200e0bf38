"""Running statistics of several processes, and what a checkpoint holds of them (P6.3, P6.7, P6.8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.findings.diagnosis import Finding, Status
from workbench.topics.batch_norm.codes import finding
from workbench.train.distributed.merge_statistics import merge_statistics

__all__ = ["first_device_ema", "rank_local", "variance_of_means"]

_Layer = tuple[NDArray[np.float64], NDArray[np.float64]]
EPS = 1e-5
"""What batch norm adds to a variance, by torch's default: in a dead channel, smaller ones do not count."""
SAME = 1e-5
"""Standard deviations that rounding may account for: float32 buffers hold seven digits (rule of thumb)."""


def rank_local(
    facts: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], *, harm: float, large_shift: float
) -> Finding:
    """Judge whether processes normalise with statistics of their own where a model is evaluated or written."""
    replicas = _stacks(facts)
    if replicas is None:
        return _simulated(facts, devices, harm)
    if _not_finite(replicas):
        return finding("rank_local", "not_measured", "Not measured: running statistics of some process are not finite.")
    count = int(facts["replicas"]["count"])
    name, value = max(((name, _apart(layer)) for name, layer in replicas.items()), key=lambda pair: pair[1])
    evidence = {
        "processes": count,
        "layer": name,
        "apart": {n: _apart(layer) for n, layer in replicas.items()},
        "metrics": facts["replicas"].get("metrics"),
    }
    numbers: dict[str, Any] = {"value": value, "unit": "standard deviations", "threshold": SAME, "evidence": evidence}
    if count < 2:
        return finding("rank_local", "ok", "One process: there is nobody to differ from.", **numbers)
    if value <= SAME:
        return finding("rank_local", "ok", f"The running statistics of {count} processes are equal.", **numbers)
    said = (
        f"The running statistics of {count} processes lie up to {value:.3g} standard deviations apart (layer {name!r})"
    )
    written = _written(facts, replicas)
    if written in ("merged", "average"):
        return finding("rank_local", "ok", f"{said}; the checkpoint holds them {_TOLD[written]}.", **numbers)
    status, told = _judged(facts, value, harm=harm, large_shift=large_shift)
    return finding(
        "rank_local", status, f"{said}: each evaluates another model, and a checkpoint depends on who writes it.{told}",
        advice=["Call wb.merge_running_statistics(model) on every process before evaluating and before writing a checkpoint.",
                "Or train with statistics of all processes: model = wb.synchronise_batch_norm(model)."], **numbers,
    )  # fmt: skip


_TOLD = {"merged": "merged", "average": "averaged"}


def _judged(facts: Mapping[str, Any], shift: float, *, harm: float, large_shift: float) -> tuple[Status, str]:
    """Return "fail" where the processes' metrics show harm, or nobody gave them and the distance is large; and what tells."""
    found = [float(value) for value in facts["replicas"].get("metrics") or ()]
    finite = [value for value in found if math.isfinite(value)]
    if not finite:
        return ("fail", "") if shift > large_shift else ("warn", f" {_ASK}")
    if len(finite) < len(found):
        return "fail", f" The metric of {len(found) - len(finite)} of {len(found)} is not finite."
    typical, span = abs(float(np.mean(finite))), max(finite) - min(finite)
    differs = span / typical if typical else math.inf if span else 0.0
    return "fail" if differs > harm else "warn", f" Their metrics differ by {differs:.2%}."


_ASK = "Whether that does harm, the metric of each process shows: audit_batch_norm(..., metrics=...)."


def _simulated(facts: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], harm: float) -> Finding:
    several = _several(devices)
    if not several:
        if facts.get("step") is not None:
            return finding("rank_local", "ok", "Trained by one process: its batch norm has nobody to differ from.")
        reason = "nobody gave the running statistics of all processes; wb.gather_running_statistics(model) returns them"
        return finding("rank_local", "not_measured", f"Not measured: {reason}.")
    worst = max(several, key=_harm)
    value = _harm(worst)
    evidence = {"devices": list(devices)}
    numbers: dict[str, Any] = {"value": value, "unit": "share", "threshold": harm, "evidence": evidence}
    if not math.isfinite(value):
        return finding(
            "rank_local",
            "not_measured",
            "Not measured: a loss with a device's own statistics is not finite.",
            **numbers,
        )
    said = (
        f"On {worst['devices']} devices with {worst['examples']} examples each ({worst['shards']} shards), running statistics lie "
        f"{worst['apart']:.3g} standard deviations apart, and the validation loss differs by {value:.2%} with whose are used"
        f"{_sorted_too(devices, worst, _harm)}"
    )
    if value <= harm:
        return finding("rank_local", "ok", f"{said}.", **numbers)
    return finding(
        "rank_local", "warn", f"{said}: unless they are synchronised, the result depends on the device that evaluates.",
        advice=["On several devices, call wb.merge_running_statistics(model) before evaluating and checkpointing, or train with "
                "wb.synchronise_batch_norm(model)."], **numbers,
    )  # fmt: skip


def _several(devices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of several devices; where examples were dealt out at random as well, sorted shards are told, not judged."""
    several = [row for row in devices if row["devices"] > 1]
    return [row for row in several if row["shards"] == "dealt"] or several


def _sorted_too(
    devices: Sequence[Mapping[str, Any]], judged: Mapping[str, Any], of: Callable[[Mapping[str, Any]], float]
) -> str:
    """Tell the largest number of the shards that are not judged, as the end of a sentence."""
    others = [of(row) for row in devices if row["devices"] > 1 and row["shards"] != judged["shards"]]
    return f" (were the shards sorted by label: {max(others):.2%})" if others else ""


def _harm(row: Mapping[str, Any]) -> float:
    """Return by which share the loss changes with the device whose statistics are used."""
    own = [float(v) for v in row["losses"]["own"]]
    return (max(own) - min(own)) / abs(float(row["losses"]["whole"])) if len(own) > 1 else 0.0


def first_device_ema(facts: Mapping[str, Any], *, harm: float, large_shift: float) -> Finding:
    """Judge whether a checkpoint, or a wrapper, keeps the running statistics of one process only."""
    replicas, code = _stacks(facts), "first_device_ema"
    copies = bool(facts.get("copies_first"))
    advice = ["Call wb.merge_running_statistics(model) on every process before the checkpoint is written, or train with "
              "wb.synchronise_batch_norm(model)."]  # fmt: skip
    if copies:
        return finding(
            code, "warn", "DistributedDataParallel copies the first process's running statistics over all others' at every forward "
            "pass, and batch norm is not synchronised: what the others saw is lost.",
            evidence={"copies_first": True}, advice=[*advice, "DistributedDataParallel(model, forward_sync_buffers=False), in older torch "
                                                        "broadcast_buffers=False, keeps each process's own."],
        )  # fmt: skip
    if replicas is None or facts.get("checkpoint") is None:
        if facts.get("step") is not None:
            return finding(code, "ok", "Trained by one process: its statistics are all there are.")
        return finding(
            code, "not_measured", "Not measured: it takes a checkpoint and the running statistics of every process."
        )
    if _not_finite(replicas):
        return finding(code, "not_measured", "Not measured: running statistics of some process are not finite.")
    count = int(facts["replicas"]["count"])
    if count < 2 or max(map(_apart, replicas.values())) <= SAME:
        return finding(code, "ok", "The processes' running statistics are equal: the checkpoint holds those of all.")
    near = [_distance(facts, {n: (m[rank], v[rank]) for n, (m, v) in replicas.items()}) for rank in range(count)]
    written = _written(facts, replicas)
    evidence = {"distances": near, "written": written}
    numbers: dict[str, Any] = {
        "value": min(near),
        "unit": "standard deviations",
        "threshold": SAME,
        "evidence": evidence,
    }
    if written in ("merged", "average"):
        return finding(
            code, "ok", f"The checkpoint holds the running statistics of {count} processes {_TOLD[written]}.", **numbers
        )
    if min(near) <= SAME:
        rank = int(np.argmin(near))
        others = max(near)
        status, told = _judged(facts, others, harm=harm, large_shift=large_shift)
        return finding(
            code, status, f"The checkpoint holds the running statistics of process {rank} alone; those of the others lie up to "
            f"{others:.3g} standard deviations away.{told}", advice=advice, **numbers,
        )  # fmt: skip
    return finding(
        code, "not_measured", "Not measured: the checkpoint's running statistics are neither those of a process nor theirs together: "
        "it was written at another step.", **numbers,
    )  # fmt: skip


def variance_of_means(facts: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], share: float) -> Finding:
    """Judge whether the spread between the means of processes is missing from a variance."""
    code, replicas = "variance_of_means", _stacks(facts)
    if replicas is None:
        return _simulated_variance(facts, devices, share)
    if _not_finite(replicas):
        return finding(code, "not_measured", "Not measured: running statistics of some process are not finite.")
    merged = {name: merge_statistics(*layer, _examples(facts)) for name, layer in replicas.items()}
    missing = {name: float(np.max(m.spread / np.maximum(m.variance, EPS))) for name, m in merged.items()}
    name = max(missing, key=lambda n: missing[n])
    value, at = missing[name], merged[name]
    channel = int(np.argmax(at.spread / np.maximum(at.variance, EPS)))
    truth, average = float(at.variance[channel]), float(at.average_variance[channel])
    evidence = {"layer": name, "channel": channel, "merged": truth, "average": average, "missing": missing}
    numbers: dict[str, Any] = {"value": value, "unit": "share", "threshold": share, "evidence": evidence}
    said = f"Averaged over the processes, a variance is {average:.3g} where that of all their examples is {truth:.3g} (layer {name!r}, channel {channel})"
    written = _written(facts, replicas) if facts.get("checkpoint") is not None else None
    if value <= share:
        return finding(code, "ok", f"{said}: the means lie close together.", **numbers)
    if written == "average":
        return finding(
            code, "fail", f"{said}, and the checkpoint holds the average.",
            advice=["Merge instead: wb.merge_running_statistics(model), or wb.merge_statistics(means, variances, counts)."], **numbers,
        )  # fmt: skip
    if written == "merged":
        return finding(code, "ok", f"{said}; the checkpoint holds the latter.", **numbers)
    return finding(
        code, "warn", f"{said}: an average leaves out how far the means lie apart.",
        advice=["Merge by the law of total variance: wb.merge_running_statistics(model)."], **numbers,
    )  # fmt: skip


def _simulated_variance(facts: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], share: float) -> Finding:
    code = "variance_of_means"
    several = _several(devices)
    if not several:
        if facts.get("step") is not None:
            return finding(code, "ok", "Trained by one process: there are no means to lie apart.")
        return finding(code, "not_measured", "Not measured: it takes the running statistics of every process.")
    worst = max(several, key=lambda row: float(row["missing"]))
    value = float(worst["missing"])
    numbers: dict[str, Any] = {
        "value": value,
        "unit": "share",
        "threshold": share,
        "evidence": {"devices": list(devices)},
    }
    said = (
        f"On {worst['devices']} devices ({worst['shards']} shards), averaging the running variances leaves out {value:.2%} of the "
        f"merged variance{_sorted_too(devices, worst, lambda row: float(row['missing']))}; the validation loss is {worst['losses']['average']:.4g} with the average, "
        f"{worst['losses']['merged']:.4g} merged, {worst['losses']['whole']:.4g} with the whole batch's"
    )
    if value <= share:
        return finding(code, "ok", f"{said}.", **numbers)
    return finding(
        code, "warn", f"{said}.", advice=["Where shards differ, merge running statistics (wb.merge_running_statistics), or deal "
                                          "the examples out at random."], **numbers,
    )  # fmt: skip


def _stacks(facts: Mapping[str, Any]) -> dict[str, _Layer] | None:
    """Return mean and variance of each layer, (processes, channels), or None where nobody gave them."""
    given = facts.get("replicas")
    if not given or not given["layers"]:
        return None
    return {n: (_array(each["mean"]), _array(each["variance"])) for n, each in given["layers"].items()}


def _examples(facts: Mapping[str, Any]) -> Any:
    return facts["replicas"].get("examples")


def _array(values: Any) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _not_finite(replicas: Mapping[str, _Layer]) -> bool:
    return not np.isfinite([_apart(layer) for layer in replicas.values()]).all()


def _apart(layer: _Layer) -> float:
    """Return the largest distance of two processes' statistics in a channel, in standard deviations."""
    mean, variance = layer
    if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
        return math.nan
    sd = np.sqrt(np.maximum(merge_statistics(mean, variance).variance, EPS))
    roots = np.sqrt(np.maximum(variance, 0.0))
    return float(max(np.max(np.ptp(mean, axis=0) / sd), np.max(np.ptp(roots, axis=0) / sd)))


def _distance(facts: Mapping[str, Any], other: Mapping[str, _Layer]) -> float:
    """Return how far the checkpoint lies from other statistics, in standard deviations of the latter."""
    found = 0.0
    for name, values in facts["checkpoint"].items():
        mean, variance = other[name]
        sd = np.sqrt(np.maximum(variance, EPS))
        roots, own = (np.sqrt(np.maximum(v, 0.0)) for v in (_array(values["variance"]), variance))
        found = max(
            found, float(np.max(np.abs(_array(values["mean"]) - mean) / sd)), float(np.max(np.abs(roots - own) / sd))
        )
    return found


def _written(facts: Mapping[str, Any], replicas: Mapping[str, _Layer]) -> str | None:
    """Return whether the checkpoint holds the processes' statistics "merged" or as an "average"; None where neither."""
    if facts.get("checkpoint") is None:
        return None
    merged = {name: merge_statistics(*layer, _examples(facts)) for name, layer in replicas.items()}
    close = {
        "merged": _distance(facts, {n: (m.mean, m.variance) for n, m in merged.items()}),
        "average": _distance(facts, {n: (m.mean, m.average_variance) for n, m in merged.items()}),
    }
    best = min(close, key=lambda kind: close[kind])
    return best if close[best] <= SAME else None
