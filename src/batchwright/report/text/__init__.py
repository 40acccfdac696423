"""Results as text for a terminal: one function for each kind of result."""
