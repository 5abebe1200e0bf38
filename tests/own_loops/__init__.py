"""Training loops as people write them, each `train(watch, seed)`; faults are planted by replacing lines of their text."""
