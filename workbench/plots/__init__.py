"""What figures share: style, frames, rendering; numbers in, Axes out. A figure never fits, smooths or decides."""
