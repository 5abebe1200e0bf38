"""Does evaluation measure what it should, often and precisely enough?"""
