"""A plan in the words of each framework: one file per framework."""
