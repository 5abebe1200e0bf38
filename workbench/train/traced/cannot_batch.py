"""`CannotBatch`: lanes of this model cannot share one program, for a reason in plain words."""

from __future__ import annotations

__all__ = ["CannotBatch"]


class CannotBatch(Exception):
    """Lanes cannot be computed together; plain autograd, one lane after the other, still can.

    Its text is the reason, fit for the record. Whoever raises it leaves the stack as it was, gradients aside.
    """
