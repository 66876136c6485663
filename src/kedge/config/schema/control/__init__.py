"""The `control` section and the groups it is composed of."""
