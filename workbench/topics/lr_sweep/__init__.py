"""Which learning rate trains best, and where does training become unstable?"""
