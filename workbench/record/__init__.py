"""The study folder: what is written while training, and read afterwards."""
