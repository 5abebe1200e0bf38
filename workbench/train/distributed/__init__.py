"""Ranks that train one model together."""
