"""Where the trials of a study run: in this process, or as chunks on a Ray cluster."""
