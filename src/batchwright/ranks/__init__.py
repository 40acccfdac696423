"""Ranks that were started together: who they are, what they tell each other, and how one that fails ends all."""
