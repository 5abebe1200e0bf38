"""Logs of runs made elsewhere, read as records that every diagnosis of curves takes."""
