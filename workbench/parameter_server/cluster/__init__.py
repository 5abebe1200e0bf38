"""Which tasks there are: the description, where it is read from, and a cluster in one process."""
