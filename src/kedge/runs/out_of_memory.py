"""Reports that a stage ran out of memory: one line with the phase, the figures, and settings that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kedge.config import Config
from kedge.config.explain.describe import written
from kedge_base.errors import ModelError, OutOfMemoryError
from kedge_base.machine.memory import Exhaustion, is_out_of_memory, release
from kedge_base.stage import Stage, find_stage

MOST_ADVICE = 3
"""Maximum number of settings that the message names."""


@contextmanager
def memory_in_one_line(config: Config, stage: str) -> Iterator[None]:
    """If memory runs out in the block, raise a one-line error instead, and free memory that the exception holds.

    Raises:
        OutOfMemoryError: Memory ran out.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ModelError) else error  # of a model that was not loaded
        if isinstance(error, OutOfMemoryError) or cause is None or not is_out_of_memory(cause):
            raise
        found = Exhaustion.of(cause, "loading")
        release(error)
    else:
        return
    described = find_stage(stage)
    remedies = described.remedies or (lambda config, phase: list(_remedies(config, described, phase))[:MOST_ADVICE])
    advice = remedies(config, found.phase)
    if not advice:
        raise OutOfMemoryError(f"{found}; raise the limit, or use a smaller model") from None
    *others, last = (f"{name}={written(value)}" for name, value in advice)
    # Another model does not match the checkpoint; settings of a registered stage may determine its number of updates.
    own = ("adapter.kind", "ppo.critic", *(f"{section}." for section in described.adds_sections))
    changes = [] if found.phase == "loading" else [each for each in advice[:1] if not each[0].startswith(own)]
    raise OutOfMemoryError(
        f"{found}. Try {', '.join(others)}{' or ' if others else ''}{last}",
        dict(changes),
    ) from None


def _remedies(config: Config, stage: Stage, phase: str) -> Iterator[tuple[str, Any]]:
    """Suggest settings that need less memory in a phase, with values, ordered by how much they help and how little they
    change.
    """
    trains_policy = "ppo" in stage.trains
    if phase == "loading":
        if stage.samples:
            yield from _smaller_frozen(config)
        if trains_policy and config.ppo.resolved_critic == "separate":
            yield "ppo.critic", "shared"
        yield from _smaller_training(config, stage)
    elif phase == "sampling":
        yield from _smaller_samples(config, stage)
    elif phase != "saving":
        if config.runtime.micro_batch_tokens != "auto":  # "auto" has already been halved to one row per pass
            yield "runtime.micro_batch_tokens", "auto"
        if phase == "the update":
            if not config.runtime.activation_checkpointing:
                yield "runtime.activation_checkpointing", True
            yield from _smaller_training(config, stage)
        elif stage.samples or not stage.trains:
            yield from _smaller_frozen(config)
        if stage.samples:
            yield "rollout.max_new_tokens", max(1, config.rollout.max_new_tokens // 2)
        elif stage.trains:
            yield "data.max_length", max(1, config.data.max_length // 2)


def _smaller_samples(config: Config, stage: Stage) -> Iterator[tuple[str, Any]]:
    longest = config.rollout.max_new_tokens
    if stage.samples:
        rows = config.rollout.micro_batch_size or config.responses_per_update
        is_adaptive = config.runtime.micro_batch_tokens == "auto" and config.rollout.micro_batch_size is None
        if rows > 1 and not is_adaptive:
            yield "rollout.micro_batch_size", rows // 2
        yield "rollout.max_new_tokens", max(1, longest // 2)
        return
    if config.generate.batch_size > 1:
        yield "generate.batch_size", config.generate.batch_size // 2
    yield "generate.max_new_tokens", max(1, (config.generate.max_new_tokens or longest) // 2)


def _smaller_training(config: Config, stage: Stage) -> Iterator[tuple[str, Any]]:
    """Suggest an adapter, which has fewer gradients and moments, or fewer bits for its base."""
    if stage.adapts and config.adapter.kind == "none":
        yield "adapter.kind", "lora"
    elif config.adapter.kind == "lora" and config.adapter.base_dtype in ("auto", "fp32"):
        yield "adapter.base_dtype", "bf16"


def _smaller_frozen(config: Config) -> Iterator[tuple[str, Any]]:
    """Suggest the next smaller number format of frozen models that needs no further library."""
    smaller = {"auto": "bf16", "fp32": "bf16", "bf16": "int8"}.get(config.runtime.frozen_dtype)
    if smaller is not None and not (smaller == "int8" and config.runtime.parallel == "shard"):
        yield "runtime.frozen_dtype", smaller
