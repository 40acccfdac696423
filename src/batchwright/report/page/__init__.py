"""A run as one HTML page: charts and words drawn from its JSON, nothing computed and nothing fetched."""
