"""Many trials of one model trained as one program on a leading lane axis."""
