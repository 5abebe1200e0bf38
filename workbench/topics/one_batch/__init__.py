"""What one batch tells before training."""
