"""Conformance suite for trainers of language models by reinforcement learning: vectors, metamorphic checks, updates."""

from ppo_conformance.protocol import Adapter, NotOffered

__all__ = ["Adapter", "NotOffered"]
