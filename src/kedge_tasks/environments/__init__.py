"""Environments, in which a policy plays episodes of several turns, and tools that it may call.

The package does not import torch, which an environment's process does not need.
"""

from kedge_tasks.environments.shapes import Step

__all__ = ["Step"]
