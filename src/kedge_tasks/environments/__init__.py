"""Environments: what a policy talks to in episodes of several turns, and the tools that it may call.

This package's own module imports no torch, as the process of an environment needs none.
"""

from kedge_tasks.environments.shapes import Step

__all__ = ["Step"]
