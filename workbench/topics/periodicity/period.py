"""`find_period`: does a series of measurements repeat itself, by how many steps, and how likely is that by chance."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d
from scipy.signal import windows
from scipy.stats import chi2, norm

Floats = NDArray[np.float64]

MIN_POINTS = 32
MIN_CYCLES = 5.0
"""Below this the trend of a run and a pattern cannot be told apart (rule of thumb)."""
APART = 8.0
"""Cycles per series between two harmonics of an epoch that count as two (rule of thumb)."""
HARMONICS = 8
HIGHEST = 0.4
"""Cycles per sample up to which the scan looks: oscillation from one sample to the next is training at the edge of stability."""
MOST_POINTS = 16_384
LOCAL = 8.0
"""Neighbourhoods in a series, within which its trend and its size are taken out (rule of thumb)."""
PADDING = 4
"""Frequencies looked at per independent one, so that no line falls between two."""
BESIDE = 3
"""Independent frequencies on either side whose noise a line is held against (rule of thumb)."""
SLOW = 2.5
"""Samples in an epoch from which values one epoch apart can be compared."""
LAGS = (1, 2)
"""Values have to be alike this many epochs apart, each by itself (rule of thumb)."""
COHERENT = 0.01
"""A line must hold its phase over the pieces of the series, at this level."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """What was found in one series."""

    reason: str | None = None  # why it could not be looked at; None where it could
    # chance of as strong a pattern in a series without one, all frequencies looked at taken into account
    p: float = 1.0
    period: float | None = None  # steps after which it repeats; None where nothing is significant
    # which multiple of 1 / epoch the strongest line is; None where it is none, or no epoch is known
    harmonic: int | None = None
    epoch_seen: bool = False  # the points can show a pattern of one epoch, and there are epochs enough
    # of the lines of one epoch, the first or all together, or of values one epoch apart that are as alike; 1 where an
    # epoch cannot be seen
    epoch_chance: float = 1.0
    epoch_bound: float = 0.0  # the chance below which they are significant
    share: float = 0.0  # of the variance from sample to sample that repeats
    size: float = 0.0  # root mean square of the repeating part, in the unit of the series
    bound: float = 0.0  # the p below which a single frequency is significant
    frequency: Floats = field(default_factory=lambda: np.empty(0))  # of the periodogram, cycles per step
    chance: Floats = field(default_factory=lambda: np.empty(0))  # p at each of them, alone


def find_period(steps: Floats, values: Floats, *, epoch: float | None = None, alpha: float = 0.01) -> Period:
    """Return whether `values` repeat, with a false-alarm rate of at most `alpha` for the series as a whole.

    Half of `alpha` goes to a scan of all periods from 2.5 samples to a fifth of the run, half to the period of one epoch with
    its harmonics, which is known beforehand. Points that are not evenly spaced are put on an even grid first.

    Args:
        steps: when each value was measured, shape (points,), increasing.
        values: of the metric; the longest finite stretch counts.
        epoch: steps per epoch, where known.
        alpha: false-alarm rate.

    Source: Thomson 1982 for holding a line against its neighbours; Fisher's method for several lines together.
    """
    steps, values = _finite_stretch(np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64))
    if len(values) < MIN_POINTS:
        return Period(reason=f"{len(values)} finite values in a row, and at least {MIN_POINTS} are needed")
    unit = float(np.abs(values).max())
    if unit == 0 or np.ptp(values / unit) <= 1e-12:
        return Period(reason="the values are constant")
    steps, values, even = _even_grid(steps, values / unit)
    spacing = (steps[-1] - steps[0]) / (len(steps) - 1)
    spectrum = _Periodogram(_prewhitened(values))
    samples, frequency, chance = spectrum.samples, spectrum.frequency, spectrum.chance
    harmonics = [] if epoch is None else _harmonics(epoch / spacing, samples, even=even)
    bound = alpha / 2 / len(chance)
    strongest = float(frequency[chance.argmin()])
    by_scan = spectrum.held(strongest, alpha * float(chance.min()) / bound)
    epoch_chance = _by_epoch(spectrum, harmonics)
    if harmonics and epoch is not None and epoch / spacing >= SLOW:  # noise that swings by itself forgets its phase
        epoch_chance = min(epoch_chance, max(spectrum.comb_chance(lag * epoch / spacing) for lag in LAGS))
    p = min(1.0, by_scan, 6 * epoch_chance)  # half of alpha, for three ways of seeing an epoch
    known = Period(
        p=p, epoch_seen=bool(harmonics), epoch_chance=epoch_chance, epoch_bound=alpha / 6, frequency=frequency / spacing,
        chance=chance, bound=bound,
    )  # fmt: skip
    if p >= alpha:
        return known
    near = [(abs(strongest - seen), multiple) for multiple, seen in harmonics]
    harmonic = min(near)[1] if near and by_scan < alpha and min(near)[0] <= 1.0 / samples else None
    if harmonic is None and 6 * epoch_chance < alpha:
        harmonic = harmonics[0][0]
    if harmonic is not None and epoch is not None:
        multiples, cycles = [multiple for multiple, _ in harmonics], spacing / epoch
    else:
        cycles = _fundamental(spectrum, strongest, bound)
        multiples = [k for k in range(1, HARMONICS + 1) if cycles * k < 0.5]
    # a sum over an even grid sees a frequency beyond half a cycle per sample where it appears
    trial = cycles + np.linspace(-0.75, 0.75, 61) / samples
    cycles = float(trial[np.argmax(sum(spectrum.energy(multiple * trial) for multiple in multiples))])
    share, size = _repeating(values, [cycles * k for k in multiples])
    return Period(
        **{**vars(known), "period": spacing / cycles, "harmonic": harmonic, "share": share, "size": unit * size}
    )


class _Periodogram:
    """Ordinates of an evenly spaced series, each held against the mean of its neighbours by an F test.

    Neighbours are whole cycles per series away, where a line leaves nothing, so nothing is assumed of the noise but that its
    spectrum is smooth over `2 * BESIDE` cycles.

    Attributes:
        samples: of the series.
        frequency: cycles per sample that are scanned, shape (frequencies,).
        chance: of as strong an ordinate without a line, shape (frequencies,).
    """

    def __init__(self, series: Floats) -> None:
        self.series, self.samples = series, len(series)
        every = np.arange(PADDING * self.samples // 2 + 1) / (PADDING * self.samples)
        scanned = np.flatnonzero((every >= MIN_CYCLES / self.samples) & (every <= HIGHEST))
        power = np.abs(np.fft.fft(series, PADDING * self.samples)) ** 2
        beside = sum(power[scanned + sign * PADDING * k] for k in range(1, BESIDE + 1) for sign in (-1, 1))
        self.frequency: Floats = every[scanned]
        self.chance: Floats = _f_chance(power[scanned], np.asarray(beside))

    def energy(self, frequency: Floats) -> Floats:
        """Return the squared Fourier sum at these frequencies, cycles per sample."""
        energy: Floats = np.abs(np.exp(-2j * np.pi * np.outer(frequency, np.arange(self.samples))) @ self.series) ** 2
        return energy

    def chance_at(self, frequency: Floats) -> Floats:
        """Return the chance of as strong an ordinate at exactly these frequencies."""
        apart = np.delete(np.arange(-BESIDE, BESIDE + 1), BESIDE) / self.samples
        beside = self.energy((frequency[:, None] + apart).ravel()).reshape(len(frequency), -1).sum(1)
        return _f_chance(self.energy(frequency), beside)

    def comb_chance(self, period: float) -> float:
        """Return the chance that values `period` samples apart are as alike without a pattern.

        The autocorrelation at that lag, summed over the frequencies above a trend, each held to its neighbourhood of one
        harmonic's spacing, so that noise of any smooth spectrum counts as white. A pattern that changes slowly from one period
        to the next, as a model does while it learns, blurs its lines and not this.
        """
        spectrum = np.abs(np.fft.rfft(self.series)) ** 2
        level = gaussian_filter1d(spectrum, self.samples / period / 2)
        place = np.arange(len(spectrum))
        used = (place > BESIDE) & (place < self.samples / 2)
        weights = np.cos(2 * np.pi * place[used] / self.samples * period)
        excess = spectrum[used] / np.maximum(level[used], 1e-300) - 1.0
        return float(norm.sf(weights @ excess / np.sqrt(weights @ weights)))

    def held(self, frequency: float, p: float, *, most: int = 12) -> float:
        """Return `p`, or 1 where a line does not hold its phase.

        The series is cut into 4 to `most` pieces of two cycles or more; their Fourier coefficients are held against zero by
        the circular T2 test (Victor and Mast 1991), which noise of changing size makes conservative.
        """
        pieces = int(min(most, max(4, frequency * self.samples // 2)))
        length = self.samples // pieces
        if p >= 1 or length < 4:
            return 1.0
        used = np.arange(pieces * length)
        turned = self.series[used] * np.exp(-2j * np.pi * frequency * used)
        each = (turned.reshape(pieces, length) * windows.hann(length, sym=False)).sum(1)
        spread = float((np.abs(each - each.mean()) ** 2).sum()) / (pieces - 1)
        size = pieces * float(np.abs(each.mean()) ** 2)
        chance = 0.0 if spread == 0 < size else (1 + size / max(spread, 1e-300) / (pieces - 1)) ** (1.0 - pieces)
        return p if chance < COHERENT else 1.0


def _f_chance(power: Floats, beside: Floats) -> Floats:
    """Return the chance of F(2, 4 * BESIDE) for an ordinate, `beside` being the sum of its neighbours."""
    return np.asarray((1.0 + power / np.maximum(beside, 1e-300)) ** (-2.0 * BESIDE))


def _finite_stretch(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the longest stretch without a value that is not finite."""
    cuts = np.flatnonzero(~np.isfinite(values))
    starts, ends = np.append(0, cuts + 1), np.append(cuts, len(values))
    longest = int(np.argmax(ends - starts))
    part = slice(starts[longest], ends[longest])
    return steps[part], values[part]


def _even_grid(steps: Floats, values: Floats) -> tuple[Floats, Floats, bool]:
    """Return the series on an even grid of as many points, and whether it was on one; very long ones are averaged."""
    gaps = np.diff(steps)
    even = bool(np.allclose(gaps[:-1], gaps[0], rtol=1e-6)) and bool(gaps[-1] <= gaps[0] * (1 + 1e-6))
    if even and not np.isclose(gaps[-1], gaps[0]):
        steps, values = steps[:-1], values[:-1]  # the last evaluation of a run comes early
    if not even:
        grid = np.linspace(steps[0], steps[-1], len(steps))
        steps, values = grid, np.interp(grid, steps, values)
    block = -(-len(values) // MOST_POINTS)
    kept = len(values) // block * block
    steps, values = (a[:kept].reshape(-1, block).mean(1) for a in (steps, values))
    return steps, values, even


def _prewhitened(values: Floats) -> Floats:
    """Return the series without trend and without what the last value says about the next, of about the same size throughout.

    What is left of a red spectrum by the first autocorrelation, held to 0 to 1, is centred and scaled by its own
    neighbourhood, because a metric moves most while the model learns most.
    """
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


def _harmonics(period: float, samples: int, *, even: bool) -> list[tuple[int, float]]:
    """Return (multiple, frequency it appears at) of one epoch of `period` samples, those that can be told from a trend.

    What is faster than two samples appears at another frequency, exactly so on an even grid; the multiples of an epoch are
    taken one by one as long as each appears at a place of its own.
    """
    kept: list[tuple[int, float]] = []
    for multiple in range(1, HARMONICS + 1) if samples / period >= MIN_CYCLES else ():
        true = multiple / period
        seen = abs(true - round(true)) if even else true
        apart = all(abs(seen - other) > APART / samples for _, other in kept)
        if MIN_CYCLES / samples <= seen <= 0.5 - APART / 4 / samples and apart:
            kept.append((multiple, seen))
    return kept


def _by_epoch(spectrum: _Periodogram, harmonics: list[tuple[int, float]]) -> float:
    """Return the chance of the lines of an epoch: the first one, or all together by Fisher's method."""
    if not harmonics:
        return 1.0
    each = spectrum.chance_at(np.array([frequency for _, frequency in harmonics]))
    together = float(chi2.sf(-2.0 * np.log(np.maximum(each, 1e-300)).sum(), 2 * len(each)))
    return spectrum.held(harmonics[int(np.argmin(each))][1], min(float(each[0]), together))


def _fundamental(spectrum: _Periodogram, strongest: float, bound: float) -> float:
    """Return the lowest significant frequency that the strongest one is a multiple of, cycles per sample."""
    for divisor in range(HARMONICS, 1, -1):
        near = np.abs(spectrum.frequency - strongest / divisor) <= 0.75 / spectrum.samples
        if near.any() and float(spectrum.chance[near].min()) < bound:
            return strongest / divisor
    return strongest


def _repeating(values: Floats, lines: list[float]) -> tuple[float, float]:
    """Return (share of the variance from sample to sample, root mean square) of the waves at `lines`, cycles per sample."""
    at = np.arange(len(values))
    waves = np.stack([wave(2 * np.pi * f * at) for f in lines for wave in (np.cos, np.sin)], axis=1)
    change = np.diff(values)
    weights, *_ = np.linalg.lstsq(np.diff(waves, axis=0), change - change.mean(), rcond=None)
    fitted = np.diff(waves, axis=0) @ weights
    return float(fitted.var() / max(change.var(), 1e-300)), float((waves @ weights).std())
