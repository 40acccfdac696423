"""Batches by budget, not by count: samples of like length together, never more than fits."""
