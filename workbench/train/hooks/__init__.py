"""Hooks observe training and add columns to the record; losses are bitwise equal with and without them."""
