"""`find_period`: does a series of measurements repeat itself, by how many steps, and how likely is that by chance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d
from scipy.stats import combine_pvalues

Floats = NDArray[np.float64]
MIN_POINTS = 32
MIN_CYCLES = 5.0
"""Below this the trend of a run and a pattern cannot be told apart (rule of thumb)."""
APART = 8.0
"""Cycles per series between two harmonics of an epoch that count as two (rule of thumb)."""
HARMONICS = 8
HIGHEST = 0.4
"""Cycles per sample up to which the scan looks: oscillation from one sample to the next is training at the edge of stability."""
LOCAL = 8.0
"""Neighbourhoods in a series, within which its trend and its size are taken out (rule of thumb)."""
PADDING = 4
"""Frequencies looked at per independent one, so that no line falls between two."""
BESIDE = 3
"""Independent frequencies on either side whose noise a line is compared with (rule of thumb)."""
SCAN, EPOCH = 4, 8
"""Shares of the false-alarm rate: a quarter for the scan, an eighth each for the first line of an epoch and for all of them. Half is kept
back, because noise near a line is only roughly that at the line (measured: tests/benchmarks/periodicity.py)."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """What was found in one series."""

    reason: str | None = None  # why it could not be looked at; None where it could
    p: float = (
        1.0  # chance of as strong a pattern in a series without one, all frequencies looked at taken into account
    )
    period: float | None = None  # steps after which it repeats; None where nothing is significant
    harmonic: int | None = None  # the multiple of 1 / epoch that the strongest line is; None where it is none
    epoch_seen: bool = False  # the points can show a pattern of one epoch, and there are epochs enough
    epoch_chance: float = 1.0  # of the lines of one epoch, the first or all together
    epoch_bound: float = 0.0  # the chance below which they are significant
    share: float = 0.0  # of the variance from sample to sample that repeats
    size: float = 0.0  # root mean square of the repeating part, in the unit of the series
    bound: float = 0.0  # the chance below which a single frequency is significant
    frequency: Floats = field(default_factory=lambda: np.empty(0))  # scanned, cycles per step
    chance: Floats = field(default_factory=lambda: np.empty(0))  # at each of them, alone


def find_period(steps: Floats, values: Floats, *, epoch: float | None = None, alpha: float = 0.01) -> Period:
    """Return whether `values` repeat, with a false-alarm rate of at most `alpha` for the series as a whole.

    The periodogram is tested at the period of one epoch, which is known beforehand, with its harmonics; and at all periods from 2.5
    samples to a fifth of the run. Points that are not evenly spaced are put on an even grid first.

    Args:
        steps: when each value was measured, shape (points,), increasing.
        values: of the metric; the longest finite stretch counts.
        epoch: steps per epoch, where known.

    Source: an F test of each ordinate against its neighbours (Thomson 1982); Fisher's method for several of them.
    """
    steps, values = _finite_stretch(np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64))
    if len(values) < MIN_POINTS:
        return Period(reason=f"{len(values)} finite values in a row, and at least {MIN_POINTS} are needed")
    unit = float(np.abs(values).max())
    if unit == 0 or np.ptp(values / unit) <= 1e-12:
        return Period(reason="the values are constant")
    steps, values, even = _even_grid(steps, values / unit)
    spacing, series = (steps[-1] - steps[0]) / (len(steps) - 1), _whitened(values)
    every, samples = _ordinate_chances(series), len(series)
    place = np.arange(len(every)) / len(every)
    scanned = (place >= MIN_CYCLES / samples) & (place <= HIGHEST)
    frequency, chance = place[scanned], every[scanned]
    harmonics = [] if epoch is None else _harmonics(epoch / spacing, samples, even=even)
    at_epoch = np.maximum([every[round(seen * len(every))] for _, seen in harmonics], 1e-300)
    epoch_chance = float(min(at_epoch[0], combine_pvalues(at_epoch).pvalue)) if harmonics else 1.0
    by_scan = SCAN * len(chance) * float(chance.min())
    found = Period(
        p=min(1.0, by_scan, EPOCH * epoch_chance), epoch_seen=bool(harmonics), epoch_chance=epoch_chance, epoch_bound=alpha / EPOCH,
        frequency=frequency / spacing, chance=chance, bound=alpha / SCAN / len(chance),
    )  # fmt: skip
    if found.p >= alpha:
        return found
    strongest = float(frequency[chance.argmin()])
    off, multiple = min(((abs(strongest - seen), k) for k, seen in harmonics), default=(np.inf, 0))
    harmonic = multiple if by_scan < alpha and off <= 1.0 / samples else None
    if harmonic is None and EPOCH * epoch_chance < alpha:
        harmonic = harmonics[0][0]
    if harmonic is not None and epoch is not None:
        multiples, cycles = [k for k, _ in harmonics], spacing / epoch
    else:
        cycles = _fundamental(frequency, chance, found.bound, samples)
        multiples = [k for k in range(1, HARMONICS + 1) if cycles * k < 0.5]
    # a sum over an even grid sees a frequency beyond half a cycle per sample where it appears
    tried = cycles + np.linspace(-0.75, 0.75, 61) / samples
    cycles = float(tried[np.argmax(sum(_energy(series, k * tried) for k in multiples))])
    share, size = _repeating(values, [cycles * k for k in multiples])
    return replace(found, period=spacing / cycles, harmonic=harmonic, share=share, size=unit * size)


def _finite_stretch(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    cuts = np.flatnonzero(~np.isfinite(values))
    starts, ends = np.append(0, cuts + 1), np.append(cuts, len(values))
    longest = int(np.argmax(ends - starts))
    part = slice(starts[longest], ends[longest])
    return steps[part], values[part]


def _even_grid(steps: Floats, values: Floats, *, most: int = 16_384) -> tuple[Floats, Floats, bool]:
    """Return the series on an even grid of as many points, and whether it was on one; very long ones are averaged."""
    gaps = np.diff(steps)
    even = bool(np.allclose(gaps[:-1], gaps[0], rtol=1e-6) and gaps[-1] <= gaps[0] * (1 + 1e-6))
    if even and not np.isclose(gaps[-1], gaps[0]):
        steps, values = steps[:-1], values[:-1]  # the last evaluation of a run comes early
    if not even:
        grid = np.linspace(steps[0], steps[-1], len(steps))
        steps, values = grid, np.interp(grid, steps, values)
    block = -(-len(values) // most)
    kept = len(values) // block * block
    steps, values = (a[:kept].reshape(-1, block).mean(1) for a in (steps, values))
    return steps, values, even


def _whitened(values: Floats) -> Floats:
    """Return the series without trend and without what the last value says about the next, of about the same size throughout."""
    at = np.linspace(-1.0, 1.0, len(values))
    centred = values - values.mean()
    straight = centred - at * float(centred @ at) / float(at @ at)
    energy = float(straight @ straight)
    memory = 0.0 if energy == 0 else float(np.clip(straight[1:] @ straight[:-1] / energy, 0.0, 1.0))
    white = straight[1:] - memory * straight[:-1]
    width = len(white) / LOCAL / 2
    white = white - gaussian_filter1d(white, width)
    size = gaussian_filter1d(np.abs(white), width)
    scaled = white / np.maximum(size, max(1e-3 * float(size.max()), 1e-300))
    return np.asarray(scaled - scaled.mean())


def _ordinate_chances(series: Floats) -> Floats:
    """Return for each frequency k / (PADDING * samples) the chance of as strong an ordinate without a line there."""
    power = np.abs(np.fft.fft(series, PADDING * len(series))) ** 2
    beside = sum(np.roll(power, sign * PADDING * k) for k in range(1, BESIDE + 1) for sign in (-1, 1))
    return np.asarray((1.0 + power / np.maximum(beside, 1e-300)) ** (-2.0 * BESIDE))


def _harmonics(period: float, samples: int, *, even: bool) -> list[tuple[int, float]]:
    """Return (multiple, frequency it appears at) of one epoch of `period` samples, those that can be told from a trend."""
    kept: list[tuple[int, float]] = []
    for multiple in range(1, HARMONICS + 1) if samples / period >= MIN_CYCLES else ():
        true = multiple / period
        seen = abs(true - round(true)) if even else true
        apart = all(abs(seen - other) > APART / samples for _, other in kept)
        if MIN_CYCLES / samples <= seen <= 0.5 - APART / 4 / samples and apart:
            kept.append((multiple, seen))
    return kept


def _fundamental(frequency: Floats, chance: Floats, bound: float, samples: int) -> float:
    """Return the lowest significant frequency that the strongest one is a multiple of, cycles per sample."""
    strongest = float(frequency[chance.argmin()])
    for divisor in range(HARMONICS, 1, -1):
        near = np.abs(frequency - strongest / divisor) <= 0.75 / samples
        if chance[near].min(initial=1.0) < bound:
            return strongest / divisor
    return strongest


def _energy(series: Floats, frequency: Floats) -> Floats:
    return np.asarray(np.abs(np.exp(-2j * np.pi * np.outer(frequency, np.arange(len(series)))) @ series) ** 2)


def _repeating(values: Floats, lines: list[float]) -> tuple[float, float]:
    """Return (share of the variance from sample to sample, root mean square) of the waves at `lines`, cycles per sample."""
    at = np.arange(len(values))
    waves = np.stack([wave(2 * np.pi * f * at) for f in lines for wave in (np.cos, np.sin)], axis=1)
    change = np.diff(values)
    weights, *_ = np.linalg.lstsq(np.diff(waves, axis=0), change - change.mean(), rcond=None)
    fitted = np.diff(waves, axis=0) @ weights
    return float(fitted.var() / max(change.var(), 1e-300)), float((waves @ weights).std())
