"""The largest micro-batch that fits: search, isolation, what is restored, ranks, shapes and memory of answers."""
