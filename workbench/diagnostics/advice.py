"""The words of the advice that more than one finding gives, so that it is given once (F2.9, F2.10)."""

from __future__ import annotations

__all__ = ["CLIPPING", "LAST_RESORT", "WARMUP"]

WARMUP = "Try learning-rate warmup: the best remedy for early instability (F2.1)."
CLIPPING = "Try gradient clipping, at first at the 90th percentile of the gradient norms (F2.2, F4.9)."
LAST_RESORT = "Lower the learning rate only as the last resort: it hides the instability instead of curing it (F2.9)."
