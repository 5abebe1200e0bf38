"""What a loop trains on: its loss functions, the graphs of its losses, and the optimizers that each loss belongs to."""
