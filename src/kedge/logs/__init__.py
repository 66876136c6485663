"""What a run writes: metrics, samples, details, incidents, progress, third-party loggers."""
