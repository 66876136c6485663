"""Checkpoints: saved atomically, verified when read, resumed with bit-identical results."""
