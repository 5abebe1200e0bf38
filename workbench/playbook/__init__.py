"""The walk from a workload to a verdict."""
