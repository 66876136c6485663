"""Settings that take less memory, for a plan to compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kedge.config import Config
from kedge.models.hollow import Blueprint

__all__ = ["LEAST_TOKENS", "SAMPLING", "alternatives_of"]

LEAST_TOKENS = 512
SAMPLING = ("critic", "ppo")
"""Stages that sample responses."""


def alternatives_of(
    config: Config, stage: str, blueprints: Mapping[str, Blueprint], *, on_gpu: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of settings as on the command line, and as values."""
    budget = config.runtime.first_pass_tokens
    if budget is None or budget > 2 * LEAST_TOKENS:
        smaller = 4096 if budget is None else budget // 4
        yield _one("runtime.micro_batch_tokens", max(smaller, LEAST_TOKENS))
    if stage in SAMPLING:
        yield from _of_sampling(config, stage, blueprints)
    if config.adapter.kind == "none":
        yield _one("adapter.kind", "lora")
        if stage in SAMPLING:
            both = {"adapter.kind": "lora", "runtime.activation_checkpointing": True}
            yield " ".join(_written(name, value) for name, value in both.items()), both
    elif config.adapter.kind == "lora" and config.adapter.base_dtype != "nf4":
        yield _one("adapter.base_dtype", "nf4")
    section = "reward_model" if stage == "reward" else stage
    if config.optimization.of(section).optimizer == "adamw":
        yield _one("optimization.optimizer", "adamw8bit")
    if on_gpu and not config.runtime.offload_optimizer:
        yield _one("runtime.offload_optimizer", True)


def _of_sampling(
    config: Config, stage: str, blueprints: Mapping[str, Blueprint]
) -> Iterator[tuple[str, dict[str, Any]]]:
    if not config.runtime.activation_checkpointing:
        yield _one("runtime.activation_checkpointing", True)
    if stage == "critic" and config.critic.kind == "separate":
        yield _one("critic.kind", "shared")
    if stage == "ppo" and config.ppo.resolved_critic == "separate" and config.ppo.critic == "separate":
        yield _one("ppo.critic", "shared")
    reference = stage == "ppo" and config.ppo.needs_reference
    if reference or any(role.startswith("reward") for role in blueprints):
        for dtype in ("bf16", "int8"):
            if config.runtime.frozen_dtype != dtype:
                yield _one("runtime.frozen_dtype", dtype)
    each = config.critic.num_responses if stage == "critic" else config.rollout.num_responses
    rows = config.rollout.num_prompts * each
    if config.rollout.micro_batch_size is None and rows > 8:
        yield _one("rollout.micro_batch_size", max(8, rows // 4))


def _one(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    return _written(name, value), {name: value}


def _written(name: str, value: Any) -> str:
    return f"{name}={str(value).lower()}"
