"""What the examples are like that something is trained and evaluated on."""
