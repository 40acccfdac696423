"""Draws results as text, HTML and plots; computes nothing."""
