"""Readable descriptions of fields, presets and schedules."""
