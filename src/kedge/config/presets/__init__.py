"""Presets: published recipes, and algorithms other than PPO. Fields that a preset leaves out keep their defaults."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.config.presets.recipe import Preset, read_presets
from kedge_base.errors import ConfigError
from kedge_base.machine.invocation import as_argument
from kedge_base.stage import imported, registered_stages, stages

RECIPES, FAMILY = (read_presets(Path(__file__).with_name(f"{name}.tsv")) for name in ("recipes", "family"))
LANGUAGE_PRESETS = [preset.name for preset in (*RECIPES, *FAMILY)]
OF_STAGES: dict[str, tuple[Preset, ...]] = {
    stage.name: imported(stage.presets) for stage in registered_stages() if stage.presets
}
"""Presets that only one stage accepts, by stage."""
PRESETS = {preset.name: preset for group in ((*RECIPES, *FAMILY), *OF_STAGES.values()) for preset in group}


def presets_of(stage: str) -> list[str]:
    """The presets that a stage accepts: its own, if any, else those for language models."""
    return [preset.name for preset in OF_STAGES[stage]] if stage in OF_STAGES else LANGUAGE_PRESETS


def stage_of(preset: str) -> str | None:
    """The stage that a preset is for; None if it is for language models."""
    return next((stage for stage, own in OF_STAGES.items() if any(each.name == preset for each in own)), None)


def advice_for(name: str) -> str | None:
    """Suggest the call for an algorithm or a class of TRL, such as `grpo` and `GRPOTrainer`; None for other names."""
    algorithm = re.sub(r"_?(trainer|config)$", "", name.lower()).replace("_", "-")
    if algorithm in PRESETS:
        stage = stage_of(algorithm) or "ppo"
        python = f"kedge.{stage}(..., preset={algorithm!r})"
        return f"it is a preset: {as_argument(f'kedge {stage} --preset {algorithm}', python)}"
    stage = "rlhf" if algorithm in ("dpo", "kto", "orpo") else algorithm  # rlhf takes the same data
    if stage not in stages():
        return None
    loop = " or kedge.PpoTrainer(...)" if stage == "ppo" else ""
    return f"in its place: {as_argument(f'kedge {stage}', f'kedge.{stage}(...){loop}')}"


def check_presets(names: Sequence[str], stage: str) -> None:
    """Check that a stage accepts the presets.

    Raises:
        ConfigError: It does not.
    """
    known = presets_of(stage)
    for name in names:
        if name not in known:
            owner = stage_of(name)
            kind = "language models" if owner is None else f"kedge {owner}"
            raise ConfigError(f"preset {name} is for {kind}; those of kedge {stage} are {', '.join(known)}")


def find_preset(name: Any) -> Preset:
    """The preset with this name.

    Raises:
        ConfigError: It does not exist.
    """
    if not isinstance(name, str) or name not in PRESETS:
        text = str(name).lower()
        near = difflib.get_close_matches(text, PRESETS, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(PRESETS)}"
        if any(all(part.strip() in PRESETS for part in text.split(sign)) for sign in ",+ " if sign in text):
            hint = "give --preset once for each, or a list of names"
        raise ConfigError(f"preset {name!r} does not exist; {hint}")
    return PRESETS[name]
