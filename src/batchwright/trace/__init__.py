"""A training step followed over tensors without memory: every storage, from birth to death."""
