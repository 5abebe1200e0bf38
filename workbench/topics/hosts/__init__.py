"""Does training over several processes do what one process would?"""
