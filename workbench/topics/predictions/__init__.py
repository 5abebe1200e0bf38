"""How do predictions of single examples change while training?"""
