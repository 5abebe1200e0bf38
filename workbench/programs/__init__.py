"""A program of one's own as what is diagnosed: run in processes of its own, observed, and changed at its optimizer's boundary alone."""
