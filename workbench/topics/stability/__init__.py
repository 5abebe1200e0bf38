"""Is training stable, and what cures it where it is not?"""
