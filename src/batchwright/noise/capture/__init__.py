"""How gradients are seen while training runs: windows of an Accumulator, loops of one's own, single examples."""
