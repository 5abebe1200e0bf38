"""A record in, findings out. NumPy, SciPy and pandas only: runs in CI, on old runs, on a laptop."""
