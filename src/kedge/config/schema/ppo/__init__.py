"""The `ppo` section and the groups it is composed of."""
