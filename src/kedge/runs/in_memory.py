"""Entries in `config.yaml` for data, rewards and functions passed from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.rewards import RewardTerm

__all__ = ["describe_in_memory"]

IN_MEMORY = "python:in_memory"


def describe_in_memory(in_memory: Mapping[str, object]) -> dict[str, Any]:
    """Values for the fields whose content was passed from Python, by dotted name.

    Rewards keep the name and weight of each term, so that readers of the run's folder can tell which term is a judge.

    Args:
        in_memory: Objects passed from Python, by dotted name.
    """
    return {name: _terms(value) if name == "reward" else IN_MEMORY for name, value in in_memory.items()}


def _terms(reward: Any) -> list[dict[str, Any]]:
    several = reward if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
    terms = [term if isinstance(term, RewardTerm) else RewardTerm(term) for term in several]
    return [{"source": _source(term.reward), "weight": term.weight, "name": term.name} for term in terms]


def _source(reward: str | Path | Callable[..., Any]) -> str:
    if isinstance(reward, (str, Path)):
        return str(reward)
    return f"python:{getattr(reward, '__name__', type(reward).__name__)}"
