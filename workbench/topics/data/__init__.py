"""Are the examples what they should be: finite, shuffled, unlike those of validation?"""
