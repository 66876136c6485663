"""Memory that runs out in a stage: one line with the phase, the figures, and the settings that help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from kedge.config import Config
from kedge.errors import ModelError, OutOfMemoryError
from kedge.runs.claim import claims
from kedge.stages.stage import find_stage
from kedge.system.invocation import refuse_nested_run
from kedge.system.memory import Exhaustion, is_out_of_memory, release
from kedge.system.streams import lasting_streams

__all__ = ["ends_in_one_line", "memory_in_one_line"]

F = TypeVar("F", bound=Callable[..., Any])

SAMPLED = ("critic", "ppo", "rlhf")
"""Stages whose `rollout` section says what they sample."""

MOST_ADVICE = 3
"""Settings that the line names."""


def ends_in_one_line(stage: str) -> Callable[[F], F]:
    """Decorates a stage's function, whose first argument is the configuration; see `memory_in_one_line`.

    Memory that runs out where no phase is noted ran out while models and data were loaded. The run's folder is claimed
    until the function returns or raises. Output that cannot be written is dropped.
    """

    def decorate(run: F) -> F:
        @wraps(run)
        def watched(config: Config, *args: Any, **kwargs: Any) -> Any:
            refuse_nested_run()
            with lasting_streams(), memory_in_one_line(config, stage), claims():
                return run(config, *args, **kwargs)

        return cast(F, watched)

    return decorate


@contextmanager
def memory_in_one_line(config: Config, stage: str) -> Iterator[None]:
    """If memory runs out in the block, raise one line in place of the exception, and free what the failure holds.

    Args:
        config: The stage's configuration.
        stage: Its name.

    Raises:
        OutOfMemoryError: Memory ran out.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ModelError) else error  # that a model could not be loaded
        if isinstance(error, OutOfMemoryError) or cause is None or not is_out_of_memory(cause):
            raise
        found = Exhaustion.of(cause, "loading")
        release(error)
    else:
        return
    advice = _advice(config, stage, found.phase)
    if not advice:
        raise OutOfMemoryError(f"{found}; raise the limit, or use a smaller model") from None
    *others, last = (f"{name}={value}" for name, value in advice)
    # Settings of a registered stage may decide how many updates the run has: no change for a run under way.
    own = tuple(f"{section}." for section in find_stage(stage).adds_sections)
    changes = [] if found.phase == "loading" else [each for each in advice[:1] if not each[0].startswith(own)]
    raise OutOfMemoryError(
        f"{found}. Try {', '.join(others)}{' or ' if others else ''}{last}",
        dict(changes),
    ) from None


def _advice(config: Config, stage: str, phase: str) -> list[tuple[str, Any]]:
    """The settings that need less memory in a phase, with values; those that help most, and change least, first."""
    described = find_stage(stage)
    if described.remedies is not None:
        return described.remedies(config, phase)
    kinds: dict[str, Callable[[Config, str], Iterator[tuple[str, Any]]]] = {
        "loading": _to_load,
        "sampling": _to_sample,
        "the update": _to_train,
        "saving": lambda config, stage: iter(()),
    }
    return list(kinds.get(phase, _to_evaluate)(config, stage))[:MOST_ADVICE]


def _to_load(config: Config, stage: str) -> Iterator[tuple[str, Any]]:
    if stage in SAMPLED:
        yield from _smaller_frozen(config)
    if stage in ("ppo", "rlhf") and config.ppo.resolved_critic == "separate":
        yield "ppo.critic", "shared"
    yield from _smaller_training(config, stage)


def _to_sample(config: Config, stage: str) -> Iterator[tuple[str, Any]]:
    if stage in SAMPLED:
        rows = config.rollout.micro_batch_size or config.responses_per_update
        is_adaptive = config.runtime.micro_batch_tokens == "auto" and config.rollout.micro_batch_size is None
        if rows > 1 and not is_adaptive:
            yield "rollout.micro_batch_size", rows // 2
        yield "rollout.max_new_tokens", max(1, config.rollout.max_new_tokens // 2)
        return
    if config.generate.batch_size > 1:
        yield "generate.batch_size", config.generate.batch_size // 2
    yield "generate.max_new_tokens", max(1, (config.generate.max_new_tokens or config.rollout.max_new_tokens) // 2)


def _to_evaluate(config: Config, stage: str) -> Iterator[tuple[str, Any]]:
    yield from _smaller_passes(config)
    if stage not in ("sft", "reward"):
        yield from _smaller_frozen(config)
    yield from _shorter_rows(config, stage)


def _to_train(config: Config, stage: str) -> Iterator[tuple[str, Any]]:
    yield from _smaller_passes(config)
    if stage in ("ppo", "rlhf") and not config.runtime.activation_checkpointing:
        yield "runtime.activation_checkpointing", "true"
    yield from _smaller_training(config, stage)
    yield from _shorter_rows(config, stage)


def _smaller_training(config: Config, stage: str) -> Iterator[tuple[str, Any]]:
    """Fewer gradients and moments: those of an adapter; or its base in fewer bits."""
    if find_stage(stage).adapts and config.adapter.kind == "none":
        yield "adapter.kind", "lora"
    elif config.adapter.kind == "lora" and config.adapter.base_dtype in ("auto", "fp32"):
        yield "adapter.base_dtype", "bf16"


def _smaller_frozen(config: Config) -> Iterator[tuple[str, Any]]:
    """The next smaller number format of frozen models that needs no other library."""
    smaller = {"auto": "bf16", "fp32": "bf16", "bf16": "int8"}.get(config.runtime.frozen_dtype)
    if smaller is not None and not (smaller == "int8" and config.runtime.parallel == "shard"):
        yield "runtime.frozen_dtype", smaller


def _smaller_passes(config: Config) -> Iterator[tuple[str, Any]]:
    if config.runtime.micro_batch_tokens != "auto":  # which was halved until a pass held a single row
        yield "runtime.micro_batch_tokens", "auto"


def _shorter_rows(config: Config, stage: str) -> Iterator[tuple[str, Any]]:
    if stage in SAMPLED:
        yield "rollout.max_new_tokens", max(1, config.rollout.max_new_tokens // 2)
    elif stage in ("sft", "reward"):
        yield "data.max_length", max(1, config.data.max_length // 2)
