"""Reward functions in isolated worker processes.

Not built on `pebble` (leaves a killed worker's children running) or `loky` (no deadline per call): both pickle.
"""
