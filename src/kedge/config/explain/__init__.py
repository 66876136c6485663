"""Descriptions of fields, presets and schedules for people."""
