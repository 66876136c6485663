"""Wraps a stage's function: claims its folder, sets up the process, and reports when memory runs out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from kedge.config import Config, load_config, with_values
from kedge.runs.claim import claims
from kedge.runs.out_of_memory import memory_in_one_line
from kedge.runs.resuming import RunFinished
from kedge.training.runtime import default_modes
from kedge_base.generators import kept_random_state
from kedge_base.machine.invocation import refuse_nested_run
from kedge_base.machine.streams import lasting_streams
from kedge_base.run_folder.output import CONFIG_FILE, is_run
from kedge_base.stage import find_stage

F = TypeVar("F", bound=Callable[..., Any])


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
