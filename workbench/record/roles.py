"""`Role`: what a trial is for in its study, as the record's column `stage` has it."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a trial is for; a string, so that a row of the record compares with it."""

    TRIAL = "trial"
    BASELINE = "baseline"
    LR_RANGE = "lr_range"
    LR_SWEEP = "lr_sweep"
    LR_UNSTABLE = "lr_unstable"
    PROBE = "probe"
    CONFIRM = "confirm"
    FIX = "fix"
    WARMUP = "warmup"
    WARMUP_FULL = "warmup_full"
    CLIPPING = "clipping"
    CLIPPING_CONTROL = "clipping_control"
    MARGIN = "margin"
    REPLACED = "replaced"
    PROOF = "proof"
    BATCH_SIZE = "batch_size"
    BATCH_SIZE_FIXED = "batch_size_fixed"
    BATCH_SIZE_SEEDS = "batch_size_seeds"
    BATCH_SIZE_DECAY = "batch_size_decay"
    BATCH_NORM_VIRTUAL = "batch_norm_virtual"
    BATCH_NORM_HELD = "batch_norm_held"
    BATCH_NORM_SPLIT = "batch_norm_split"
    BATCH_NORM_SWAP = "batch_norm_swap"
    OPTIMIZERS = "optimizers"
    OPTIMIZERS_RANGE = "optimizers_range"
    OPTIMIZERS_SEEDS = "optimizers_seeds"
    OPTIMIZERS_TWIN = "optimizers_twin"
    EVALUATION = "evaluation"
    EVALUATION_PAUSE = "evaluation_pause"
    CHECKPOINTS = "checkpoints"
    INPUT_PIPELINE = "input_pipeline"
    PARAMETER_SERVER = "parameter_server"
    RESUME = "resume"


STAGES = {role.value: role.replace("_", " ") for role in Role} | {
    "lr_sweep": "sweep", "lr_unstable": "search for the unstable lr", "probe": "twice the best lr", "confirm": "far above the best lr",
    "fix": "fixes", "proof": "proof, new seeds",
}  # fmt: skip
"""What a trial is for, as people read it."""

POINTS = frozenset({
    Role.TRIAL, Role.BASELINE, Role.LR_SWEEP, Role.LR_UNSTABLE, Role.CONFIRM, Role.CHECKPOINTS, Role.PARAMETER_SERVER,
    Role.BATCH_SIZE, Role.BATCH_SIZE_FIXED, Role.BATCH_SIZE_SEEDS, Role.BATCH_SIZE_DECAY,
    Role.BATCH_NORM_VIRTUAL, Role.BATCH_NORM_HELD, Role.BATCH_NORM_SPLIT, Role.BATCH_NORM_SWAP,
})  # fmt: skip
"""Roles whose trials count as points of a learning-rate sweep, where their configs differ from the baseline's by the learning rate alone."""

SHORT = frozenset({Role.LR_RANGE, Role.OPTIMIZERS_RANGE, Role.PROBE})
"""Roles whose trials do not run to their end."""
