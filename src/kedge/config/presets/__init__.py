"""Presets: published recipes, and the algorithms beside PPO. What a preset does not give keeps its default."""

import difflib
from typing import Any

from kedge.config.presets.control import CONTROL
from kedge.config.presets.family import FAMILY
from kedge.config.presets.instructgpt import INSTRUCTGPT
from kedge.config.presets.recipe import Cited, Preset
from kedge.config.presets.s2_defaults import S2_DEFAULTS
from kedge.config.presets.small_cpu import SMALL_CPU
from kedge.config.presets.stiennon import STIENNON
from kedge.config.presets.tldr_n_plus import TLDR_N_PLUS
from kedge.config.presets.ziegler import ZIEGLER
from kedge.errors import ConfigError

__all__ = ["CONTROL_PRESETS", "LANGUAGE_PRESETS", "PRESETS", "Cited", "Preset", "find_preset"]

RECIPES = (TLDR_N_PLUS, INSTRUCTGPT, STIENNON, ZIEGLER, S2_DEFAULTS, SMALL_CPU)
PRESETS = {preset.name: preset for preset in (*RECIPES, *FAMILY, *CONTROL)}
CONTROL_PRESETS = [name for name, preset in PRESETS.items() if preset.is_for_control]
LANGUAGE_PRESETS = [name for name in PRESETS if name not in CONTROL_PRESETS]


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
