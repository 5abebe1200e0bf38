"""Path A: `fit`, `evaluate` and `predict`, their callbacks and checkpoints, the side-car evaluator."""
