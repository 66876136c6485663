"""Starts a command as several ranks: torchrun's command lines, or Ray with restarts."""
