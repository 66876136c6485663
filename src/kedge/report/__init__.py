"""What a run leaves behind: its folder, its metrics, samples, plots and tables, and its progress while it runs."""
