"""Pure arithmetic of the batch: no torch, no numpy, no loop over samples."""
