"""Environments, with which a policy plays episodes of several turns, and the tools that it may call.

The package imports no torch, which an environment's process does not need.
"""

from kedge_tasks.environments.shapes import Step

__all__ = ["Step"]
