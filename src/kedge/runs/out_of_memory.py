"""Reports that a stage ran out of memory: one line with the phase, the figures, and settings that help."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from kedge.config import Config, load_config, with_values
from kedge.config.explain.describe import written
from kedge.runs.claim import claims
from kedge.runs.resuming import RunFinished
from kedge.training.runtime import default_modes
from kedge_base.errors import ModelError, OutOfMemoryError
from kedge_base.generators import kept_random_state
from kedge_base.machine.invocation import refuse_nested_run
from kedge_base.machine.memory import Exhaustion, is_out_of_memory, release
from kedge_base.machine.streams import lasting_streams
from kedge_base.run_folder.output import CONFIG_FILE, is_run
from kedge_base.stage import Stage, find_stage

F = TypeVar("F", bound=Callable[..., Any])

MOST_ADVICE = 3
"""Maximum number of settings that the message names."""


def stage_function(stage: str, finished: Callable[[Path], object] | None = None) -> Callable[[F], F]:
    """Decorate a stage's function, whose first argument is the configuration.

    Out-of-memory errors are reported as in `memory_in_one_line`; without a noted phase, memory ran out while models and
    data were loaded. The run's folder is claimed until the function ends. Output that cannot be written is dropped.
    During the call, torch has its `default_modes`; afterwards, the global random generators are restored. Activation
    checkpointing is decided first; see `decided`.

    Args:
        stage: The stage.
        finished: Reads the result of a resumed run that has already finished; None for a stage that cannot be resumed.
    """

    def decorate(run: F) -> F:
        @wraps(run)
        def called(config: Config, *args: Any, **kwargs: Any) -> Any:
            refuse_nested_run()
            if finished is not None and kwargs.get("resume"):
                kwargs["resume"] = replace(kwargs["resume"], skips_finished=True)
            with lasting_streams(), kept_random_state(), default_modes():
                config = decided(config, stage, planned=kwargs.get("planned"), resumes=kwargs.get("resume") is not None)
                with memory_in_one_line(config, stage), claims():
                    try:
                        return run(config, *args, **kwargs)
                    except RunFinished as ended:
                        assert finished is not None, "only then are finished runs skipped"
                        return finished(ended.folder)

        return cast(F, called)

    return decorate


def decided(config: Config, stage: str, *, planned: Any = None, resumes: bool = False) -> Config:
    """Replace `runtime.activation_checkpointing=auto` by the plan's decision, or by that of the run to resume.

    Args:
        config: The configuration. That of a chain keeps `auto`, for each of its stages.
        stage: The stage.
        planned: The plan, if there is one already.
        resumes: A run in `config.out` is resumed.
    """
    described = find_stage(stage)
    if config.runtime.activation_checkpointing != "auto" or len(described.trains) != 1 or not described.has_plan:
        return config
    folder = Path(os.path.expanduser(config.out or ""))
    if resumes and config.out is not None and is_run(folder):
        again = load_config(folder / CONFIG_FILE).runtime.activation_checkpointing
    else:
        plan = planned or described.find_plan()(config, stage, anyway=True)
        again = plan is not None and plan.recomputes
    return with_values(config, {"runtime.activation_checkpointing": again})


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
