"""A run's folder: its files, what makes it complete, and how its records are read."""
