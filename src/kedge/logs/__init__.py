"""A run's files: metrics, samples, details, incidents, progress, third-party loggers."""
