"""Seconds of a step on a card you do not have, from the work that its trace writes down."""
