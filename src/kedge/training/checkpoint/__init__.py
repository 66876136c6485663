"""Checkpoints: saved atomically, verified when read, resumed bit for bit."""
