"""What one batch tells before any training: can it be fitted, what reaches the outputs, layer by layer, and what the loss does with them."""
