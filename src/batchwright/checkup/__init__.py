"""`batchwright check`: what this machine is, and whether each part of batchwright works on it."""
