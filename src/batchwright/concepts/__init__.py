"""The concepts behind the numbers: one Markdown page per topic and language, shipped with the package."""
