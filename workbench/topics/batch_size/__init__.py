"""Which batch size is worth its steps?"""
