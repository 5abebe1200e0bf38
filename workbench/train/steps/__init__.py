"""How an update is made where a person makes it: `Workload(step=...)`."""
