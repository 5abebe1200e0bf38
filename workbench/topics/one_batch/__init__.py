"""What the data, the fresh model, one step and one batch tell before training."""
