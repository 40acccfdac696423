"""Facts as data files: cards and the shapes of public models, each with its source."""
