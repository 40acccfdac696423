"""Where a probe runs: host memory or an accelerator; and what out-of-memory looks like."""
