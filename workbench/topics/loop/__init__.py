"""Does a training loop of one's own do what a loop should, in the order in which it should?"""
