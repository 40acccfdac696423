"""The largest micro-batch that fits: search, isolation, what is given back, ranks, shapes and memory of answers."""
