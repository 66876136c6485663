"""Comparing policies: sampling, judges, opponents, and labeling a policy's own responses."""
