"""Processes that run code that may never finish: they can be killed, and end when kedge does.

Not built on `pebble` (leaves a killed worker's children running) or `loky` (no deadline per call): both pickle.
"""
