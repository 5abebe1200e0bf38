"""How tensors travel between processes: shared memory or Ray's object store, chosen by where the ends are."""
