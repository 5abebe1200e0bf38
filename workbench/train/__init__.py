"""How one trial is trained: a step-based loop, update rules, clipping, evaluation, checkpoints, hooks."""
