"""PNG plots of a run and of results."""
