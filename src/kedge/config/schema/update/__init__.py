"""`ppo` in parts: the fields of the PPO update, by topic."""
