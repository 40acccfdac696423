"""Accumulation that equals the big batch, and the proof of it on a training step."""
