"""Which update rule, with which constants?"""
