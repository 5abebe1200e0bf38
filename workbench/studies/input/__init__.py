"""Facts about an input pipeline: where the time of a step goes, what loading it is made of, and what the step uses of it."""
