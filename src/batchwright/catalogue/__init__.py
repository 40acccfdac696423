"""Facts as data files: the shapes of public models, each with its source."""
