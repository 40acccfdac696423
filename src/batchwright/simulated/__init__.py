"""A GPU that is not there: its cards, its allocator, what its kernels take."""
