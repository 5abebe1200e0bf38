"""What a loop trains on: its loss functions, the graphs of its losses, the optimizers that each loss belongs to, and how closely to look at it."""
