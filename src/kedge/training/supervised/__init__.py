"""The supervised training loop, its losses, and reward model training."""
