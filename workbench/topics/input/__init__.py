"""Does training wait for its data?"""
