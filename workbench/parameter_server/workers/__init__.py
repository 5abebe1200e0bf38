"""What a worker runs, keeps and sends: closures, resources, per-worker values, buffers."""
