"""The report: one page a study."""
