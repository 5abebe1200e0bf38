"""Notebooks as functions: parameters, runs, summaries."""
