"""A run's folder: the names of its files, checks of its state, and reading of its records."""
