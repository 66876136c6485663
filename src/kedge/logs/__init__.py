"""What a run writes: metrics, samples, details, incidents, plots, progress, third-party loggers."""
