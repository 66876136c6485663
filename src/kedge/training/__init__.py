"""Learning: the PPO update, the supervised loop, their optimiser, and what a run stands on."""
