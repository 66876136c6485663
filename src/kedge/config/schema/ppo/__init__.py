"""The `ppo` section, one file per subject."""
