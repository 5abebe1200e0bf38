"""Is a warmup needed, and how long?"""
