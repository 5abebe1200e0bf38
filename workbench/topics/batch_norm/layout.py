"""`statistics_layout`: whose examples make batch norm's statistics, for a batch on so many hosts (P6.3 to P6.6)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis

__all__ = ["StatisticsLayout", "measured_at", "statistics_layout"]


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
            said += f"A host has too few: synchronise {self.hosts_each} at a time (P6.3; wb.synchronise_batch_norm(model, group)). "
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


def measured_at(diagnosis: Diagnosis, examples: int) -> Mapping[str, Any] | None:
    """Return what a study trained with statistics from so many examples: its row of `batch_norm.ghost_size`; None where it did not.

    Args:
        diagnosis: of `diagnose_batch_norm`.
        examples: in a statistic.
    """
    found = diagnosis["batch_norm.ghost_size"].evidence.get("arms") if "batch_norm.ghost_size" in diagnosis else None
    return next((row for row in found or () if int(row["statistic"]) == examples), None)
