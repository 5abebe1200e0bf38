"""What servers hold and how it is reached: planes of values, variables, partitions, a module's parameters."""
