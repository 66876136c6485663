"""The supervised loop, its losses, and the training of reward models."""
