"""Is every trial on record?"""
