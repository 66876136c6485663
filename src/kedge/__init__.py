"""PPO for language models: supervised fine-tuning, a reward model, PPO.

    import kedge

    result = kedge.ppo(model="path/or/hub-id", prompts=["Once upon a time"], reward=my_function, out="runs/story")

Names are imported on first use, so that `import kedge` and `kedge --help` are instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kedge_base.version import __version__

if TYPE_CHECKING:
    from kedge.api import (
        check_critic,
        critic,
        doctor,
        evaluate,
        generate,
        merge,
        pass_at_k,
        ppo,
        preview_data,
        push,
        reward,
        rlhf,
        sft,
        sweep,
        write_report,
    )
    from kedge.runs.loaded_models import LoadedModel
    from kedge.runs.training import Update
    from kedge.stages.ppo.own_loop import PpoTrainer
    from kedge_base.errors import KedgeError
    from kedge_tasks.environments.shapes import Step

__all__ = [
    "KedgeError",
    "LoadedModel",
    "PpoTrainer",
    "Step",
    "Update",
    "__version__",
    "check_critic",
    "critic",
    "doctor",
    "evaluate",
    "generate",
    "merge",
    "pass_at_k",
    "ppo",
    "preview_data",
    "push",
    "reward",
    "rlhf",
    "sft",
    "sweep",
    "write_report",
]

_MODULES = dict.fromkeys(__all__, "kedge.api") | {
    "KedgeError": "kedge_base.errors",
    "LoadedModel": "kedge.runs.loaded_models",
    "PpoTrainer": "kedge.stages.ppo.own_loop",
    "Step": "kedge_tasks.environments.shapes",
    "Update": "kedge.runs.training",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if not name.startswith("_") and name in (added := _added()):
        return importlib.import_module("kedge_base.stage").imported(added[name])
    line = f"module 'kedge' has no attribute {name!r}"
    if not name.startswith("_") and (advice := importlib.import_module("kedge.config.presets").advice_for(name)):
        raise ImportError(f"{line}; {advice}")  # an AttributeError would be lost in `from kedge import GRPOTrainer`
    raise AttributeError(line)


def __dir__() -> list[str]:
    """The names that `import kedge` provides, for completion in a shell or a notebook."""
    return sorted({*globals(), *__all__, *_added()})


def _added() -> dict[str, str]:
    """The names that registered stages add, and what they stand for."""
    from kedge_base.stage import registered_stages

    return {name: reference for stage in registered_stages() for name, reference in stage.python.items()}
