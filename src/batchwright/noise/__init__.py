"""The critical batch size: estimated live, with an interval, and what to do about it."""
