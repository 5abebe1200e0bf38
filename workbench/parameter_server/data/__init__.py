"""What workers read: input contexts, per-worker and distributed datasets, batches, vocabularies."""
