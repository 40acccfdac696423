"""Where a probe runs: host memory, an accelerator, later a simulated card; and what out-of-memory looks like."""
