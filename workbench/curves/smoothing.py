"""Noise of one loss curve, and the narrowest median that brings it below what was learned."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter

FloatArray = NDArray[np.float64]
WIDTHS: tuple[int, ...] = (3, 5, 9, 17, 33, 65)  # widths of the centred median that are tried, in steps
MEDIAN_PENALTY = 1.2533  # standard error of a median over that of a mean, for normal noise: sqrt(pi / 2)
_RESOLUTION = float(np.finfo(np.float32).eps)
_RECENT = 17
_NEAR = (9, 33)


def fill_gaps(loss: FloatArray) -> tuple[FloatArray, bool]:
    """Cut a non-finite tail off, bridge single non-finite values (skipped steps), and tell whether there was a tail."""
    finite = np.isfinite(loss)
    if not finite.any():
        return np.empty(0), loss.size > 0
    last = int(np.flatnonzero(finite)[-1])
    kept, steps = loss[: last + 1].copy(), np.arange(last + 1)
    hole = ~finite[: last + 1]
    kept[hole] = np.interp(steps[hole], steps[~hole], kept[~hole])
    return kept, last + 1 < loss.size


def noise_per_step(loss: FloatArray, loss_se: FloatArray | None, *, full_batch: bool) -> FloatArray:
    """Return the standard deviation of each step's loss around that of the whole training set, shape (steps,).

    The root mean square of the recorded `loss_se` (NaN where unknown) over the last 17 steps (rule of thumb): a small batch without
    the hard examples shows a low loss and a low error at once. Where it is unknown, 1.4826 MAD / sqrt(6) of the second differences
    up to the step, half of the run but 9 to 33 of them (rule of thumb): noise falls with the loss, and that of the whole run is
    too small for its beginning; a loss that explodes is no noise to what was before. Never below the resolution of a float32 loss, which is all there is for a full batch.
    """
    floor: FloatArray = 4.0 * _RESOLUTION * np.abs(loss)
    if full_batch:
        return floor
    noise = np.full(loss.size, np.nan)
    if loss_se is not None:
        noise = np.asarray(loss_se, dtype=np.float64)[: loss.size].copy()
        noise[~np.isfinite(noise)] = np.nan
    if np.isnan(noise).all():
        return np.maximum(_difference_noise(loss), floor)
    noise[np.isnan(noise)] = float(np.nanmedian(noise))
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(noise, (_RECENT - 1, 0)), _RECENT)
    rms = np.hypot.reduce(windows, axis=1) / np.sqrt(np.minimum(np.arange(noise.size) + 1, _RECENT))
    out: FloatArray = np.maximum(rms, floor)
    return out


def _difference_noise(values: FloatArray) -> FloatArray:
    """Return the noise of each value, shape (steps,), of the second differences up to it, or of the first ones.

    These look ahead, and may hold an explosion: they count for no more than the first loss, or than the run as a whole where the
    first loss belongs to it (rule of thumb).
    """
    if values.size < 5:
        return np.zeros(values.size)
    second = np.abs(np.diff(values, n=2))
    width = min(max(_NEAR[0], min(_NEAR[1], values.size // 2)), second.size)
    medians = np.median(np.lib.stride_tricks.sliding_window_view(second, width), axis=1)
    until = np.clip(np.arange(values.size) - 1 - width, 0, medians.size - 1)
    ahead = np.arange(values.size) <= width
    most = abs(float(values[0])) * math.sqrt(6.0) / 1.4826
    if not _left_behind(values):
        most = max(most, float(np.median(second)))
    out: FloatArray = 1.4826 / math.sqrt(6.0) * np.where(ahead, np.minimum(medians[until], most), medians[until])
    return out


def _left_behind(values: FloatArray, *, sds: float = 6.0) -> bool:
    """Tell whether the first of positive losses lies below the later half by `sds` of its standard deviations (rule of thumb).

    Logarithms are compared: the losses of a run that explodes with its first updates are spread as widely as they are large.
    """
    if values.min() <= 0:
        return False
    first, later = math.log(values[0]), np.log(values[values.size // 2 :])
    level = float(np.median(later))
    return first < level - sds * 1.4826 * max(float(np.median(np.abs(later - level))), 1e-3)


def running_median(values: FloatArray, width: int) -> FloatArray:
    """Return the centred median of `width` steps, shape (steps,); the window shrinks at both ends."""
    if width <= 1 or values.size < 3:
        return values
    half = width // 2
    out: FloatArray = median_filter(values, size=width, mode="nearest")
    for k in range(min(half, values.size)):
        out[k] = np.median(values[: 2 * k + 1])
        out[-1 - k] = np.median(values[values.size - 2 * k - 1 :])
    return out


def smooth(
    loss: FloatArray,
    noise: FloatArray,
    *,
    loss_ref: float,
    total_steps: int,
    progress: float | None,
    full_batch: bool,
    max_noise_frac: float = 0.025,
) -> tuple[FloatArray, FloatArray, int]:
    """Smooth with the narrowest median whose noise is small against what the run, or its study, has learned.

    Args:
        max_noise_frac: noise allowed after smoothing, as a share of the progress (rule of thumb).

    Returns:
        The smoothed loss and its noise, both of shape (steps,), and the width in steps.
    """
    if full_batch:
        return loss, noise, 1
    typical = float(np.median(noise[loss <= np.median(loss)]))
    width, smoothed = 1, loss
    for width in [w for w in WIDTHS if w <= max(3, total_steps // 10)]:
        smoothed = running_median(loss, width)
        gained = progress if progress is not None else loss_ref - float(smoothed.min())
        if MEDIAN_PENALTY * typical / np.sqrt(width) <= max_noise_frac * gained:
            break
    if width <= 1:
        return smoothed, noise, width
    steps = np.arange(noise.size)
    window = np.minimum(width, 2 * np.minimum(steps, steps[::-1]) + 1)
    left = running_median(noise, width) * np.where(window > 1, MEDIAN_PENALTY / np.sqrt(window), 1.0)
    return smoothed, left, width


def kept(steps: NDArray[Any], values: NDArray[Any], columns: int) -> NDArray[np.int64]:
    """Return the positions that draw the same picture: both ends, and of each column of steps the lowest and highest value.

    Args:
        steps: in order, shape (rows,).
        values: shape (rows,); where a column has none that is finite, its first row stays, so that the gap does.
        columns: into which the steps are divided evenly; no more than two rows in each stay.
    """
    count = len(steps)
    if count <= 2 * columns:
        return np.arange(count)
    span = int(steps[-1]) - int(steps[0]) + 1
    column = (steps.astype(np.int64) - int(steps[0])) * columns // span
    begins = np.flatnonzero(np.diff(column, prepend=-1))
    group = np.repeat(np.arange(len(begins)), np.diff(begins, append=count))
    finite = np.isfinite(values)
    found = [np.array([0, count - 1])]
    for sign in (1.0, -1.0):
        height = np.where(finite, sign * values, np.inf)
        hit = np.flatnonzero(height == np.minimum.reduceat(height, begins)[group])
        found.append(hit[np.diff(group[hit], prepend=-1) > 0])
    return np.unique(np.concatenate(found))
