"""Batch norm on several processes: whose examples make a statistic, and what running statistics and a checkpoint then hold (P6.3 to P6.8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import UsageError
from workbench.findings.finding import Codes, Finding, Status
from workbench.train.distributed.merge_statistics import merge_statistics

CODES = Codes({
    "batch_norm.rank_local": "P6.3", "batch_norm.first_device_ema": "P6.8", "batch_norm.variance_of_means": "P6.7",
    "batch_norm.ghost_size": "P6.6", "batch_norm.small_batch": "P6.2", "batch_norm.cold_ema": "P6.7", "batch_norm.stale": "P6.7",
})  # fmt: skip
_Layer = tuple[NDArray[np.float64], NDArray[np.float64]]


EPS = 1e-5
"""What batch norm adds to a variance, by torch's default: in a dead channel, smaller ones do not count."""


SAME = 1e-5
"""Standard deviations that rounding may account for: float32 buffers hold seven digits (rule of thumb)."""


_TOLD = {"merged": "merged", "average": "averaged"}
_NOT_FINITE = "running statistics of some process are not finite"


def rank_local(
    facts: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], *, harm: float, large_shift: float
) -> Finding:
    """Judge whether processes normalise with statistics of their own where a model is evaluated or written."""
    code, replicas = "batch_norm.rank_local", _stacks(facts)
    if replicas is None:
        return _simulated(facts, devices, harm)
    apart = {name: _apart(layer) for name, layer in replicas.items()}
    if not np.isfinite(list(apart.values())).all():
        return CODES.not_measured(code, _NOT_FINITE)
    count = int(facts["replicas"]["count"])
    name, value = max(apart.items(), key=lambda pair: pair[1])
    evidence = {"processes": count, "layer": name, "apart": apart, "metrics": facts["replicas"].get("metrics")}
    numbers: dict[str, Any] = {"value": value, "unit": "standard deviations", "threshold": SAME, "evidence": evidence}
    if count < 2:
        return CODES.finding(code, "ok", "One process: there is nobody to differ from.", **numbers)
    if value <= SAME:
        return CODES.finding(code, "ok", f"The running statistics of {count} processes are equal.", **numbers)
    said = (
        f"The running statistics of {count} processes lie up to {value:.3g} standard deviations apart (layer {name!r})"
    )
    written = _written(facts, replicas)
    if written is not None:
        return CODES.finding(code, "ok", f"{said}; the checkpoint holds them {_TOLD[written]}.", **numbers)
    status, told = _judged(facts, value, harm=harm, large_shift=large_shift)
    return CODES.finding(
        code, status, f"{said}: each evaluates another model, and a checkpoint depends on who writes it.{told}",
        advice=["Call wb.batch_norm.merge_running_statistics(model) on every process before evaluating and before writing a checkpoint.",
                "Or train with statistics of all processes: model = wb.batch_norm.synchronise(model)."], **numbers,
    )  # fmt: skip


def _judged(facts: Mapping[str, Any], shift: float, *, harm: float, large_shift: float) -> tuple[Status, str]:
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


def _simulated(facts: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], harm: float) -> Finding:
    code, several = "batch_norm.rank_local", _several(devices)
    if not several:
        if facts.get("step") is not None:
            return CODES.finding(code, "ok", "Trained by one process: its batch norm has nobody to differ from.")
        why = "nobody gave the running statistics of all processes; wb.batch_norm.gather_running_statistics(model) returns them"
        return CODES.not_measured(code, why)
    worst = max(several, key=_harm)
    value = _harm(worst)
    numbers: dict[str, Any] = {
        "value": value,
        "unit": "share",
        "threshold": harm,
        "evidence": {"devices": list(devices)},
    }
    if not math.isfinite(value):
        return CODES.not_measured(code, "a loss with a device's own statistics is not finite", **numbers)
    said = (
        f"On {worst['devices']} devices with {worst['examples']} examples each ({worst['shards']} shards), running statistics lie "
        f"{worst['apart']:.3g} standard deviations apart, and the validation loss differs by {value:.2%} with whose are used"
        f"{_sorted_too(devices, worst, _harm)}"
    )
    if value <= harm:
        return CODES.finding(code, "ok", f"{said}.", **numbers)
    return CODES.finding(
        code, "warn", f"{said}: unless they are synchronised, the result depends on the device that evaluates.",
        advice=["On several devices, call wb.batch_norm.merge_running_statistics(model) before evaluating and checkpointing, or train with "
                "wb.batch_norm.synchronise(model)."], **numbers,
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
    code, replicas = "batch_norm.first_device_ema", _stacks(facts)
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
    apart = [_apart(layer) for layer in replicas.values()]
    if not np.isfinite(apart).all():
        return CODES.not_measured(code, _NOT_FINITE)
    count = int(facts["replicas"]["count"])
    if count < 2 or max(apart) <= SAME:
        return CODES.finding(
            code, "ok", "The processes' running statistics are equal: the checkpoint holds those of all."
        )
    near = [_distance(facts, {n: (m[rank], v[rank]) for n, (m, v) in replicas.items()}) for rank in range(count)]
    written = _written(facts, replicas)
    numbers: dict[str, Any] = {
        "value": min(near), "unit": "standard deviations", "threshold": SAME, "evidence": {"distances": near, "written": written},
    }  # fmt: skip
    if written is not None:
        said = f"The checkpoint holds the running statistics of {count} processes {_TOLD[written]}."
        return CODES.finding(code, "ok", said, **numbers)
    if min(near) <= SAME:
        status, told = _judged(facts, max(near), harm=harm, large_shift=large_shift)
        return CODES.finding(
            code, status, f"The checkpoint holds the running statistics of process {int(np.argmin(near))} alone; those of the others lie up to "
            f"{max(near):.3g} standard deviations away.{told}", advice=advice, **numbers,
        )  # fmt: skip
    why = "the checkpoint's running statistics are neither those of a process nor theirs together: it was written at another step"
    return CODES.not_measured(code, why, **numbers)


def variance_of_means(facts: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], share: float) -> Finding:
    """Judge whether the spread between the means of processes is missing from a variance."""
    code, replicas = "batch_norm.variance_of_means", _stacks(facts)
    if replicas is None:
        return _simulated_variance(facts, devices, share)
    if not np.isfinite([_apart(layer) for layer in replicas.values()]).all():
        return CODES.not_measured(code, _NOT_FINITE)
    merged = {name: merge_statistics(*layer, facts["replicas"].get("examples")) for name, layer in replicas.items()}
    missing = {name: float(np.max(m.spread / np.maximum(m.variance, EPS))) for name, m in merged.items()}
    name = max(missing, key=lambda n: missing[n])
    value, at = missing[name], merged[name]
    channel = int(np.argmax(at.spread / np.maximum(at.variance, EPS)))
    truth, average = float(at.variance[channel]), float(at.average_variance[channel])
    evidence = {"layer": name, "channel": channel, "merged": truth, "average": average, "missing": missing}
    numbers: dict[str, Any] = {"value": value, "unit": "share", "threshold": share, "evidence": evidence}
    said = f"Averaged over the processes, a variance is {average:.3g} where that of all their examples is {truth:.3g} (layer {name!r}, channel {channel})"
    written = _written(facts, replicas)
    if value <= share:
        return CODES.finding(code, "ok", f"{said}: the means lie close together.", **numbers)
    if written == "merged":
        return CODES.finding(code, "ok", f"{said}; the checkpoint holds the latter.", **numbers)
    if written == "average":
        return CODES.finding(
            code, "fail", f"{said}, and the checkpoint holds the average.",
            advice=["Merge instead: wb.batch_norm.merge_running_statistics(model), or wb.batch_norm.merge_statistics(means, variances, counts)."], **numbers,
        )  # fmt: skip
    return CODES.finding(
        code, "warn", f"{said}: an average leaves out how far the means lie apart.",
        advice=["Merge by the law of total variance: wb.batch_norm.merge_running_statistics(model)."], **numbers,
    )  # fmt: skip


def _simulated_variance(facts: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], share: float) -> Finding:
    code, several = "batch_norm.variance_of_means", _several(devices)
    if not several:
        if facts.get("step") is not None:
            return CODES.finding(code, "ok", "Trained by one process: there are no means to lie apart.")
        return CODES.not_measured(code, "it takes the running statistics of every process")
    worst = max(several, key=lambda row: float(row["missing"]))
    value, losses = float(worst["missing"]), worst["losses"]
    numbers: dict[str, Any] = {
        "value": value,
        "unit": "share",
        "threshold": share,
        "evidence": {"devices": list(devices)},
    }
    said = (
        f"On {worst['devices']} devices ({worst['shards']} shards), averaging the running variances leaves out {value:.2%} of the "
        f"merged variance{_sorted_too(devices, worst, lambda row: float(row['missing']))}; the validation loss is {losses['average']:.4g} with the average, "
        f"{losses['merged']:.4g} merged, {losses['whole']:.4g} with the whole batch's."
    )
    if value <= share:
        return CODES.finding(code, "ok", said, **numbers)
    advice = [
        "Where shards differ, merge running statistics (wb.batch_norm.merge_running_statistics), or deal the examples out at random."
    ]
    return CODES.finding(code, "warn", said, advice=advice, **numbers)


def _stacks(facts: Mapping[str, Any]) -> dict[str, _Layer] | None:
    """Return mean and variance of each layer, (processes, channels), or None where nobody gave them."""
    given = facts.get("replicas")
    if not given or not given["layers"]:
        return None
    return {n: (_array(each["mean"]), _array(each["variance"])) for n, each in given["layers"].items()}


def _array(values: Any) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


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
        of_mean, of_root = np.abs(_array(values["mean"]) - mean) / sd, np.abs(roots - own) / sd
        found = max(found, float(np.max(of_mean)), float(np.max(of_root)))
    return found


def _written(facts: Mapping[str, Any], replicas: Mapping[str, _Layer]) -> str | None:
    """Return whether the checkpoint holds the processes' statistics "merged" or as an "average"; None where neither."""
    if facts.get("checkpoint") is None:
        return None
    merged = {name: merge_statistics(*layer, facts["replicas"].get("examples")) for name, layer in replicas.items()}
    close = {
        "merged": _distance(facts, {n: (m.mean, m.variance) for n, m in merged.items()}),
        "average": _distance(facts, {n: (m.mean, m.average_variance) for n, m in merged.items()}),
    }
    best = min(close, key=lambda kind: close[kind])
    return best if close[best] <= SAME else None


@dataclass(frozen=True, kw_only=True)
class StatisticsLayout:
    """One batch norm layer in one step.

    Attributes:
        batch_size: examples of a step, over all hosts.
        hosts: that they are split over.
        asked: examples that a statistic should have; None is what each host has.
        few_examples: below which the noise of a statistic costs accuracy (Wu and He 2018, arXiv:1803.08494).
    """

    batch_size: int
    hosts: int
    asked: int | None
    few_examples: int = 16

    @property
    def per_host(self) -> int:
        """Examples on each host."""
        return self.batch_size // self.hosts

    @property
    def hosts_each(self) -> int:
        """Hosts that share a statistic, and have to be synchronised for it."""
        return 1 if self.asked is None else min(self.hosts, math.ceil(self.asked / self.per_host))

    @property
    def synchronised(self) -> bool:
        """Whether no host has enough examples of its own."""
        return self.hosts_each > 1

    @property
    def examples(self) -> int:
        """Examples that each statistic is made of."""
        whole = self.per_host * self.hosts_each
        return whole if self.asked is None else min(whole, self.asked)

    @property
    def statistics(self) -> int:
        """Different statistics in a step; with more than one, running statistics differ as well (P6.7, P6.8)."""
        return math.ceil(self.hosts / self.hosts_each)

    @property
    def left_out(self) -> float:
        """Share of the examples that are normalised and make no statistic (P6.6)."""
        return 1 - self.examples / (self.per_host * self.hosts_each)

    @property
    def words(self) -> str:
        """All of it in a few sentences."""
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        made = f"{self.statistics} statistic{'s' * (self.statistics != 1)} a step from {self.examples:,} examples{' each' * (self.statistics != 1)}"
        said = f"A batch of {self.batch_size:,} on {hosts} is {self.per_host:,} examples on each: {made}. "
        if self.synchronised:
            said += f"A host has too few: synchronise {self.hosts_each} at a time (P6.3; wb.batch_norm.synchronise(model, group)). "
        else:
            said += "No host needs another's examples for it. "
        if self.asked is not None and self.asked > self.batch_size:
            said += f"More than the whole batch, {self.asked:,}, cannot be had. "
        if self.left_out:
            said += f"{self.left_out:.0%} of the examples make no statistic (P6.6). "
        if self.examples < self.few_examples:
            said += f"Below {self.few_examples} examples their noise costs accuracy. "
        if self.statistics > 1:
            said += "Running statistics differ from host to host: merge them before a checkpoint (P6.7)."
        return said.strip()


def statistics_layout(batch_size: int, hosts: int, stat_examples: int | None) -> StatisticsLayout:
    """Split a batch over hosts.

    Args:
        batch_size: examples of a step, over all hosts.
        hosts: that they are split over, evenly.
        stat_examples: examples that a statistic should have, the virtual batch (about 64 in P6.4); None is what each host has.

    Raises:
        UsageError: a host would get no example, or hosts unequal shares.
    """
    for name, value in (("batch_size", batch_size), ("hosts", hosts), ("stat_examples", stat_examples)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{name}={value!r} must be an integer of at least 1.")
    if batch_size % hosts:
        raise UsageError(
            f"batch_size={batch_size} cannot be split over hosts={hosts} evenly: take a multiple of {hosts}."
        )
    return StatisticsLayout(batch_size=batch_size, hosts=hosts, asked=stat_examples)
