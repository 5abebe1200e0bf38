"""Does what was learned hold on validation, and was anything learned?"""
