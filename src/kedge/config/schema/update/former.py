"""Settings of earlier versions, still accepted in this one: run folders have them in `config.yaml`."""

from collections.abc import Mapping
from typing import Any

FORMER = {
    "dual_clip": (None, "ppo.policy_loss={dual_clip: 3}"),
    "surrogate_kl_coef": (1.0, "ppo.policy_loss={kl_penalty_fixed: 1}"),
    "value_gradient": ("trunk", "ppo.critic=detached"),
    "freeze_critic": ("none", "ppo.critic=frozen_attention"),
}
"""Former settings of `ppo`, with their defaults, which had no effect, and their replacements."""

ANSWERS = {**{name: now for name, (_, now) in FORMER.items()}, "rest": "data.draw={evenly: 3}"}
"""The replacement of each former setting, by name without the section."""


def without_former(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert former settings of `ppo` to current ones.

    Raises:
        ValueError: A former setting does not fit the current one that it is now a part of.
    """
    found = {name: value for name, value in settings.items() if name not in FORMER}
    for name in (name for name in FORMER if name in settings and settings[name] != FORMER[name][0]):
        found |= _now(name, settings[name], found)
    return found


def _now(name: str, value: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    loss, critic = settings.get("policy_loss", "clipped"), settings.get("critic", "auto")
    if name == "dual_clip" and loss == "clipped":
        return {"policy_loss": {"dual_clip": value}}
    if name == "surrogate_kl_coef" and ("policy_loss" not in settings or str(loss).startswith("kl_penalty")):
        return {"policy_loss": {settings.get("policy_loss", "kl_penalty_fixed"): value}}
    if name == "surrogate_kl_coef":
        return {}  # a recorded setting that had no effect
    if name == "value_gradient" and value == "head" and critic in ("auto", "shared"):
        return {"critic": "detached"}
    if name == "freeze_critic" and value == "attention" and critic == "separate":
        return {"critic": "frozen_attention"}
    raise ValueError(f"ppo.{name}={value} is now {FORMER[name][1]}; write that")


def without_rest(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the former `rest` in the settings of `data` to the parameter of `draw`."""
    draw = settings.get("draw", "evenly")
    if "rest" not in settings or not isinstance(draw, str):
        return settings
    found = {name: value for name, value in settings.items() if name != "rest"}
    return {**found, "draw": {draw: settings["rest"]} if settings["rest"] else draw}
