"""`closure_size`: how many updates a worker should make each time it is asked (T13.7, T14.3)."""

from __future__ import annotations

import math

__all__ = ["closure_size"]


def closure_size(dispatch_s: float, step_s: float, updates: float, workers: int) -> int:
    """Return how many updates a closure should make.

    Of a stretch of n updates each of W workers makes n / W. In closures of k updates a worker loses n d / (W k) to their dispatch,
    and at the end of the stretch, when there is nothing left to take, k s / 2 on average to waiting for the last one. The sum is
    smallest at k = sqrt(2 n d / (W s)).

    Args:
        dispatch_s: d, what a closure costs a worker beside its updates, in seconds.
        step_s: s, an update on its worker, in seconds.
        updates: n, until everybody waits for everybody (an evaluation, a checkpoint).
        workers: W.

    Returns:
        At least 1, at most the share of one worker; 1 where nothing was measured.

    Source: T14.3; the formula is ours.
    """
    if not (dispatch_s > 0 and step_s > 0 and updates > 0 and workers > 0):
        return 1
    most = max(1, int(updates // workers))
    return max(1, min(most, round(math.sqrt(2 * updates * dispatch_s / (workers * step_s)))))
