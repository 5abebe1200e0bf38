"""Which checkpoint to take, and does training resume where it stopped?"""
