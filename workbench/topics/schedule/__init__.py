"""Does the learning rate's schedule do what it should?"""
