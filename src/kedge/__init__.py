"""PPO for language models: supervised fine-tuning, a reward model, PPO.

    import kedge

    result = kedge.ppo(model="path/or/hub-id", prompts=["Once upon a time"], reward=my_function, out="runs/story")

Names are imported on first use, so that `import kedge` and `kedge --help` are instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kedge_base.packages import accept_old_names
from kedge_base.registry import registered
from kedge_base.version import __version__

accept_old_names()

if TYPE_CHECKING:
    from kedge.api import critic, merge, ppo, preview_data, reward, rlhf, sft
    from kedge.runs.loaded_models import LoadedModel
    from kedge.runs.training import Update
    from kedge.stages.ppo.own_loop import PpoTrainer
    from kedge_base.errors import KedgeError
    from kedge_hub.api import push
    from kedge_inspect.api import doctor, verify, write_report
    from kedge_lab.api import check_critic, evaluate, generate, pass_at_k, sweep
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
    "verify",
    "write_report",
]

_MODULES = dict.fromkeys(("critic", "merge", "ppo", "preview_data", "reward", "rlhf", "sft"), "kedge.api") | {
    "KedgeError": "kedge_base.errors",
    "LoadedModel": "kedge.runs.loaded_models",
    "PpoTrainer": "kedge.stages.ppo.own_loop",
    "Update": "kedge.runs.training",
}
"""Module of each public name in this package; other packages add names through the entry points `kedge.names`."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if not name.startswith("_") and (entry := registered("kedge.names").get(name)):
        return entry.load()
    if not name.startswith("_") and (added := _added()).get(name):
        return importlib.import_module("kedge_base.stage").imported(added[name])
    line = f"module 'kedge' has no attribute {name!r}"
    if not name.startswith("_") and (advice := importlib.import_module("kedge.config.presets").advice_for(name)):
        raise ImportError(f"{line}; {advice}")  # an AttributeError would be lost in `from kedge import GRPOTrainer`
    raise AttributeError(line)


def __dir__() -> list[str]:
    """The names that `import kedge` provides, for completion in a shell or a notebook."""
    return sorted({*globals(), *__all__, *registered("kedge.names"), *_added()})


def _added() -> dict[str, str]:
    """Names added by registered stages, with their values."""
    from kedge_base.stage import registered_stages

    return {name: reference for stage in registered_stages() for name, reference in stage.python.items()}
