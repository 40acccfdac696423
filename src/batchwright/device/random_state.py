"""Stands in for `batchwright.state.random_state` until nothing imports it from here."""

from batchwright.state.random_state import kept_random_state, put_back_of_generator, random_sources

__all__ = ["kept_random_state", "put_back_of_generator", "random_sources"]
