"""The user's own command, unmodified: run under hooks, cut after a few optimizer steps, run again."""
