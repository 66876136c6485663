"""`ppo` in parts: the fields of the PPO update by what they are about."""
