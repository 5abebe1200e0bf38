"""A training loop that belongs to somebody else: what it does, observed while it runs, and changed at its optimizer alone."""
