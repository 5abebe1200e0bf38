"""`find_period`: does a series of measurements repeat itself, by how many steps, and how likely is that by chance."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from workbench.topics.periodicity.line_spectrum import BANDWIDTH, LineSpectrum, line_spectrum

__all__ = ["MIN_CYCLES", "MIN_POINTS", "Period", "find_period"]

Floats = NDArray[np.float64]

MIN_POINTS = 32
MIN_CYCLES = BANDWIDTH + 1.0
"""Below this the trend of a run and a pattern cannot be told apart: the test compares a line with its neighbours."""
HARMONICS = 8
HIGHEST = 0.4
"""Cycles per sample up to which the scan looks: oscillation from one sample to the next is training at the edge of stability."""
SLOW = 2.5
"""Samples in an epoch from which values one epoch apart can be compared."""
LAGS = (1, 2)
"""Values have to be alike this many epochs apart, each by itself (rule of thumb)."""
MOST_POINTS = 16_384
COHERENT = 0.01
"""A line must hold its phase over the pieces of the series, at this level."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """What was found in one series.

    Attributes:
        reason: why it could not be looked at; None where it could.
        p: chance of as strong a pattern in a series without one, all frequencies looked at taken into account.
        period: steps after which it repeats; None where nothing is significant.
        harmonic: which multiple of 1 / epoch the strongest line is; None where it is none, or no epoch is known.
        epoch_seen: the points can show a pattern of one epoch, and there are epochs enough.
        epoch_chance: of the lines of one epoch, the first or all together, or of values one epoch apart that are as alike; 1 where
            an epoch cannot be seen.
        epoch_bound: the chance below which they are significant.
        share: of the variance from sample to sample that repeats.
        size: root mean square of the repeating part, in the unit of the series.
        frequency: of the spectrum, cycles per step.
        chance: p at each of them, alone.
        bound: the p below which a single frequency is significant.
        power: of the spectrum.
    """

    reason: str | None = None
    p: float = 1.0
    period: float | None = None
    harmonic: int | None = None
    epoch_seen: bool = False
    epoch_chance: float = 1.0
    epoch_bound: float = 0.0
    share: float = 0.0
    size: float = 0.0
    bound: float = 0.0
    frequency: Floats = field(default_factory=lambda: np.empty(0))
    chance: Floats = field(default_factory=lambda: np.empty(0))
    power: Floats = field(default_factory=lambda: np.empty(0))


def find_period(steps: Floats, values: Floats, *, epoch: float | None = None, alpha: float = 0.01) -> Period:
    """Return whether `values` repeat, with a false-alarm rate of at most `alpha` for the series as a whole.

    Half of `alpha` goes to a scan of all periods from 2.5 samples to a fifth of the run, half to the period of one epoch with
    its harmonics, which is known beforehand. Points that are not evenly spaced are put on an even grid first.

    Args:
        steps: when each value was measured, shape (points,), increasing.
        values: of the metric; the longest finite stretch counts.
        epoch: steps per epoch, where known.
        alpha: false-alarm rate.
    """
    steps, values = _finite_stretch(np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64))
    if len(values) < MIN_POINTS:
        return Period(reason=f"{len(values)} finite values in a row, and at least {MIN_POINTS} are needed")
    unit = float(np.abs(values).max())
    if unit == 0 or np.ptp(values / unit) <= 1e-12:
        return Period(reason="the values are constant")
    steps, values, even = _even_grid(steps, values / unit)
    spacing = (steps[-1] - steps[0]) / (len(steps) - 1)
    spectrum = line_spectrum(values)
    harmonics = [] if epoch is None else _harmonics(epoch / spacing, spectrum.samples, even=even)
    scanned = _in_scan(spectrum)
    strongest = int(scanned[np.argmin(spectrum.p[scanned])])
    by_scan = _held(spectrum, spectrum.frequency[strongest], 2 * float(spectrum.p[strongest]) * len(scanned))
    epoch_chance = _by_epoch(spectrum, harmonics)
    if harmonics and epoch is not None and epoch / spacing >= SLOW:
        alike = max(
            spectrum.comb_p(lag * epoch / spacing) for lag in LAGS
        )  # noise that swings by itself forgets its phase
        epoch_chance = min(epoch_chance, alike)
    by_epoch = 6 * epoch_chance
    p = min(1.0, by_scan, by_epoch)
    found = p < alpha
    multiple = _multiple(spectrum.frequency[strongest], harmonics, spectrum.samples) if by_scan < alpha else None
    if found and multiple is None and by_epoch < alpha:
        multiple = harmonics[0][0]
    if multiple is not None and epoch is not None:
        multiples, cycles = [k for k, _ in harmonics], spacing / epoch
    else:
        cycles = _fundamental(spectrum, strongest, alpha / 2 / len(scanned))
        multiples = [k for k in range(1, HARMONICS + 1) if cycles * k < 0.5]
    cycles = _refined(spectrum, cycles, multiples) if found else cycles
    share, size = _repeating(values, [cycles * k for k in multiples]) if found else (0.0, 0.0)
    return Period(
        p=p,
        period=spacing / cycles if found else None,
        harmonic=multiple if found else None,
        epoch_seen=bool(harmonics),
        epoch_chance=epoch_chance,
        epoch_bound=alpha / 6,
        share=share,
        size=unit * size,
        frequency=spectrum.frequency[scanned] / spacing,
        chance=spectrum.p[scanned],
        bound=alpha / 2 / len(scanned),
        power=spectrum.power[scanned],
    )


def _finite_stretch(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the longest stretch without a value that is not finite."""
    cuts = np.flatnonzero(~np.isfinite(values))
    starts, ends = np.append(0, cuts + 1), np.append(cuts, len(values))
    if len(cuts) == 0:
        return steps, values
    longest = int(np.argmax(ends - starts))
    return steps[starts[longest] : ends[longest]], values[starts[longest] : ends[longest]]


def _is_even(steps: Floats) -> bool:
    gaps = np.diff(steps)
    return bool(np.allclose(gaps[:-1], gaps[0], rtol=1e-6)) and bool(gaps[-1] <= gaps[0] * (1 + 1e-6))


def _even_grid(steps: Floats, values: Floats) -> tuple[Floats, Floats, bool]:
    """Return the series on an even grid of as many points, and whether it was on one; very long ones are averaged."""
    even = _is_even(steps)
    if even and not np.isclose(steps[-1] - steps[-2], steps[1] - steps[0]):
        steps, values = steps[:-1], values[:-1]  # the last evaluation of a run comes early
    if not even:
        grid = np.linspace(steps[0], steps[-1], len(steps))
        steps, values = grid, np.interp(grid, steps, values)
    block = -(-len(values) // MOST_POINTS)
    if block > 1:
        kept = len(values) // block * block
        steps, values = (a[:kept].reshape(-1, block).mean(1) for a in (steps, values))
    return steps, values, even


def _in_scan(spectrum: LineSpectrum) -> NDArray[np.int64]:
    low = MIN_CYCLES / spectrum.samples
    return np.flatnonzero((spectrum.frequency >= low) & (spectrum.frequency <= HIGHEST))


def _harmonics(period: float, samples: int, *, even: bool) -> list[tuple[int, float]]:
    """Return (multiple, frequency it appears at) of one epoch of `period` samples, those that can be told from a trend.

    What is faster than two samples appears at another frequency, exactly so on an even grid; the multiples of an epoch are
    taken one by one as long as each appears at a place of its own.
    """
    kept: list[tuple[int, float]] = []
    if samples / period < MIN_CYCLES:
        return kept
    for multiple in range(1, HARMONICS + 1):
        true = multiple / period
        seen = abs(true - round(true)) if even else true
        apart = all(abs(seen - other) > 2 * BANDWIDTH / samples for _, other in kept)
        if MIN_CYCLES / samples <= seen <= (0.5 - BANDWIDTH / 2 / samples) and apart:
            kept.append((multiple, seen))
    return kept


def _held(spectrum: LineSpectrum, frequency: float, p: float) -> float:
    """Return `p`, or 1 where the line does not hold its phase."""
    return p if p < 1 and spectrum.coherence_p(float(frequency)) < COHERENT else 1.0


def _by_epoch(spectrum: LineSpectrum, harmonics: list[tuple[int, float]]) -> float:
    """Return the chance of the lines of an epoch: the first one, or all together by Fisher's method."""
    if not harmonics:
        return 1.0
    each = np.array([spectrum.p_at(frequency) for _, frequency in harmonics])
    together = float(chi2.sf(-2.0 * np.log(np.maximum(each, 1e-300)).sum(), 2 * len(each)))
    strongest = harmonics[int(np.argmin(each))][1]
    return _held(spectrum, strongest, min(float(each[0]), together))


def _multiple(frequency: float, harmonics: list[tuple[int, float]], samples: int) -> int | None:
    near = [(abs(frequency - seen), multiple) for multiple, seen in harmonics]
    return min(near)[1] if near and min(near)[0] <= 1.0 / samples else None


def _refined(spectrum: LineSpectrum, fundamental: float, multiples: list[int]) -> float:
    """Return the fundamental frequency near this one whose multiples hold most power, cycles per sample.

    The tapers blur a frequency to BANDWIDTH; the plain Fourier sum does not, and sees a frequency beyond half a cycle per
    sample where it appears.
    """
    trial = fundamental + np.linspace(-0.75, 0.75, 61) / spectrum.samples
    power = sum(spectrum.energy_at(multiple * trial) for multiple in multiples)
    return float(trial[np.argmax(power)])


def _fundamental(spectrum: LineSpectrum, strongest: int, bound: float) -> float:
    """Return the lowest significant frequency that the strongest one is a multiple of, cycles per sample."""
    best = float(spectrum.frequency[strongest])
    near = 1.0 / spectrum.samples
    for divisor in range(HARMONICS, 1, -1):
        place = np.abs(spectrum.frequency - best / divisor) <= near / 2
        place &= spectrum.frequency >= MIN_CYCLES / spectrum.samples
        if place.any() and float(spectrum.p[place].min()) < bound:
            return best / divisor
    return best


def _repeating(values: Floats, lines: list[float]) -> tuple[float, float]:
    """Return (share of the variance from sample to sample, root mean square) of the waves at `lines`, cycles per sample."""
    at = np.arange(len(values))
    waves = np.stack([wave(2 * np.pi * f * at) for f in lines for wave in (np.cos, np.sin)], axis=1)
    change = np.diff(values)
    weights, *_ = np.linalg.lstsq(np.diff(waves, axis=0), change - change.mean(), rcond=None)
    fitted = np.diff(waves, axis=0) @ weights
    pattern = waves @ weights
    return float(fitted.var() / max(change.var(), 1e-300)), float(pattern.std())
