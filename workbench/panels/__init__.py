"""Panels: figures with controls, for a notebook that somebody is looking at."""
