"""What one rank of a training job does, observed from inside without changing it."""
