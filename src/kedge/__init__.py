"""PPO for language models, from a laptop's CPU to a cluster."""
