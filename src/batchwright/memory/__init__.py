"""The memory of a training step, predicted before it runs: from a trace, or by formula for a named model."""
