"""Reward functions in isolated worker processes."""
