"""Trainers of other libraries, watched as `wb.watch` watches a loop: one small callback for each, over one `Watching`."""
