"""More than one machine: what has to be agreed between them, and how they are reached."""
