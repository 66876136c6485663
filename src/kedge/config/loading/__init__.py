"""Resolves presets, files, overrides and flags to one validated configuration."""
