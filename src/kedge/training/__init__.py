"""Training: the PPO update, the supervised loop, the optimizer, guards and checkpoints."""
