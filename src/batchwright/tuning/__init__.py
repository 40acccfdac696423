"""`tune`: every measurement joined into one answer."""
