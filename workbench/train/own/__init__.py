"""What a person brings ready made: an optimizer of their own, and a scheduler of torch."""
