"""One step of many lanes as a program: recorded, cleaned up, checked, and called on rows of the stack."""
