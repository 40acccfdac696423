"""A mixture of experts, traced."""
