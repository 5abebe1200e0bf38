"""Does the training loss repeat with the epochs?"""
