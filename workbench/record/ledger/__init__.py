"""Every trial of every study in one table."""
