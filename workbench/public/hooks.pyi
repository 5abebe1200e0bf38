"""Hooks observe training and add columns to the record; losses are bitwise equal with and without them."""

from workbench.train.hooks import Activations as Activations
from workbench.train.hooks import Hook as Hook
from workbench.train.hooks import Norms as Norms
from workbench.train.hooks import Timing as Timing
from workbench.train.hooks import UpdateRatios as UpdateRatios

__all__ = ["Activations", "Hook", "Norms", "Timing", "UpdateRatios"]
