"""The typed schema of the configuration: one file per section."""
