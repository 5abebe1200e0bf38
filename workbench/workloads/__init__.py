"""Workloads: what is trained. `base` has the contract, `helpers` the short ways, `registry` the names."""
