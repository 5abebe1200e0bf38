"""One training step as a straight list of tensor operations: recorded, cleaned up, and written out as a function."""
