"""Judging loss curves and sweeps: numbers of a record in, verdicts out; without torch."""
