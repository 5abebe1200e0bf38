"""Which config to train with, and what to try next?"""
