"""Does training wait for its data loader, and why?"""
