"""Which frequencies of a series are lines: Thomson's multitaper F test, exact against noise of any smooth spectrum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d
from scipy.signal import windows
from scipy.stats import norm

__all__ = ["TAPERS", "LineSpectrum", "line_spectrum", "prewhiten"]

Floats = NDArray[np.float64]

BANDWIDTH = 4.0
"""Time half-bandwidth: a line is held against the noise within this many cycles per series of its frequency (Thomson's 4)."""
TAPERS = 7
"""Slepian tapers, 2 * BANDWIDTH - 1: as many as leak little."""
PADDING = 4
"""Frequencies looked at per independent one, so that no line falls between two."""

LOCAL = 8.0
"""Neighbourhoods in a series, within which its trend and its size are taken out (rule of thumb)."""


@dataclass(frozen=True, kw_only=True)
class LineSpectrum:
    """The test of a line at every frequency of an evenly spaced series.

    Attributes:
        frequency: cycles per sample, shape (frequencies,).
        power: multitaper estimate of the spectrum of the prewhitened series, shape (frequencies,).
        p: chance of as strong a line without one, F(2, 2 * TAPERS - 2), shape (frequencies,).
        samples: of the prewhitened series.
    """

    frequency: Floats
    power: Floats
    p: Floats
    samples: int
    _series: Floats
    _tapers: Floats

    def p_at(self, frequency: float) -> float:
        """Return the chance of as strong a line at exactly this frequency, cycles per sample."""
        waves = np.exp(-2j * np.pi * frequency * np.arange(self.samples))
        return float(_line_p((self._tapers * (self._series * waves)).sum(1)[:, None], self._tapers.sum(1))[0])

    def energy_at(self, frequency: Floats) -> Floats:
        """Return the squared Fourier sum of the prewhitened series at each frequency, cycles per sample."""
        waves = np.exp(-2j * np.pi * np.outer(frequency, np.arange(self.samples)))
        energy: Floats = np.abs(waves @ self._series) ** 2
        return energy

    def comb_p(self, period: float) -> float:
        """Return the chance that values `period` samples apart are as alike without a pattern.

        The autocorrelation at that lag, summed over the frequencies above a trend, each held to its neighbourhood of one
        harmonic's spacing, so that noise of any smooth spectrum counts as white. A pattern that changes slowly from one period
        to the next, as a model does while it learns, blurs its lines and not this.
        """
        count = self.samples
        spectrum = np.abs(np.fft.rfft(self._series)) ** 2
        level = gaussian_filter1d(spectrum, count / period / 2)
        place = np.arange(len(spectrum))
        used = (place > BANDWIDTH) & (place < count / 2)
        weights = np.cos(2 * np.pi * place[used] / count * period)
        excess = spectrum[used] / np.maximum(level[used], 1e-300) - 1.0
        return float(norm.sf(weights @ excess / np.sqrt(weights @ weights)))

    def coherence_p(self, frequency: float, *, most: int = 12) -> float:
        """Return the chance that the pieces of the series agree as well in phase at this frequency without a line.

        The series is cut into 4 to `most` pieces of two cycles or more; their Fourier coefficients are held against zero by
        the circular T2 test (Victor and Mast 1991), which noise of changing size makes conservative.
        """
        pieces = int(min(most, max(4, frequency * self.samples // 2)))
        length = self.samples // pieces
        if length < 4:
            return 1.0
        used = np.arange(pieces * length)
        turned = self._series[used] * np.exp(-2j * np.pi * frequency * used)
        each = (turned.reshape(pieces, length) * windows.hann(length, sym=False)).sum(1)
        spread = float((np.abs(each - each.mean()) ** 2).sum()) / (pieces - 1)
        size = pieces * float(np.abs(each.mean()) ** 2)
        return 0.0 if spread == 0 < size else float((1 + size / max(spread, 1e-300) / (pieces - 1)) ** (1.0 - pieces))


def line_spectrum(values: Floats) -> LineSpectrum:
    """Return the line test of an evenly spaced series at every frequency.

    A line adds to all tapers' coefficients in a proportion that is known; what is left is noise of the frequencies nearby.
    So nothing is assumed of the noise but that its spectrum is smooth, which autocorrelated noise, a decay and a few jumps
    all have, and no threshold is fitted.

    Args:
        values: shape (samples,), finite, not constant, at least 32.

    Source: Thomson 1982 (harmonic analysis by the multitaper method).
    """
    series = prewhiten(values)
    count = len(series)
    tapers: Floats = windows.dpss(count, BANDWIDTH, TAPERS)
    size = 1 << int(np.ceil(np.log2(PADDING * count)))
    coefficients = np.fft.rfft(tapers * series, size, axis=1)
    return LineSpectrum(
        frequency=np.arange(coefficients.shape[1]) / size,
        power=(np.abs(coefficients) ** 2).mean(0),
        p=_line_p(coefficients, tapers.sum(1)),
        samples=count,
        _series=series,
        _tapers=tapers,
    )


def prewhiten(values: Floats) -> Floats:
    """Return the series without trend and without what the last value says about the next, of about the same size throughout.

    The slope of a red spectrum is what a line test stumbles over; the first autocorrelation, held to 0 to 1, takes most of it.
    What is left is centred and scaled by its own neighbourhood, wide enough to let a period pass that fits LOCAL times into
    the series, because a metric moves most while the model learns most.
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
    scaled: Floats = white / np.maximum(size, max(1e-3 * float(size.max()), 1e-300))
    scaled -= scaled.mean()
    return scaled


def _line_p(coefficients: NDArray[np.complex128], sums: Floats) -> Floats:
    """Return the chance of the F value of each column of `coefficients`, shape (tapers, frequencies)."""
    total = float(sums @ sums)
    line = sums @ coefficients / total
    rest = (np.abs(coefficients - sums[:, None] * line) ** 2).sum(0)
    ratio = np.abs(line) ** 2 * total / np.maximum(rest, 1e-300)
    chance: Floats = (1.0 + ratio) ** (1.0 - len(sums))
    return chance
