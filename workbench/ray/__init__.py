"""Start, join and secure a Ray cluster."""
