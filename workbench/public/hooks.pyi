"""Hooks observe training and add columns to the record; losses are bitwise equal with and without them."""

from workbench.train.hooks.activations import Activations as Activations
from workbench.train.hooks.base import Hook as Hook
from workbench.train.hooks.norms import Norms as Norms
from workbench.train.hooks.timing import Timing as Timing
from workbench.train.hooks.update_ratios import UpdateRatios as UpdateRatios

__all__ = ["Activations", "Hook", "Norms", "Timing", "UpdateRatios"]
