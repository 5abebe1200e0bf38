"""Which practices of its architecture does a model follow?"""
