"""Facts about the data of a live workload or loader: overlap of splits, order, scale, workers."""
