"""What a diagnosis consists of, its order and its advice."""
