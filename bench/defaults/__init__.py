"""Learning rates that suit small models: short PPO runs over a grid of settings, several models and rewards."""
