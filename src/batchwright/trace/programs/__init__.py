"""A whole program, unmodified, whose host is real and whose card is simulated."""
