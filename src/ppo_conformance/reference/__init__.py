"""The reference trainer: numpy float64, for reading."""
