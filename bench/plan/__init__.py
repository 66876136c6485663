"""Predicted and measured memory and time of PPO runs."""
