"""Does gradient clipping help, and at which norm?"""
