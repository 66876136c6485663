"""Settings of earlier versions, still accepted in this one: run folders have them in `config.yaml`."""

from collections.abc import Mapping
from typing import Any

from kedge.config.schema.field import plain
from kedge.config.schema.section import Section, parameters_of

FORMER = {
    "dual_clip": (None, "ppo.policy_loss={dual_clip: 3}"),
    "surrogate_kl_coef": (1.0, "ppo.policy_loss={kl_penalty_fixed: 1}"),
    "value_gradient": ("trunk", "ppo.critic=detached"),
    "freeze_critic": ("none", "ppo.critic=frozen_attention"),
}
"""Former settings of `ppo`, with their defaults, which had no effect, and their replacements."""

ANSWERS = {**{name: now for name, (_, now) in FORMER.items()}, "rest": "data.draw={evenly: 3}"}
"""The replacement of each former setting, by name without the section."""


PARTS = {
    "ppo.kl_target": "ppo.kl_controller.target",
    "ppo.kl_wait_fraction": "ppo.kl_controller.wait",
    "ppo.eval_num_prompts": "ppo.eval_every.num_prompts",
    "ppo.value_warmup_until": "ppo.value_warmup_updates.until",
    "ppo.ptx_batch": "ppo.ptx_coef.batch",
    "ppo.importance_cap": "ppo.old_logprobs.cap",
    "ppo.critic_check_size": "ppo.critic_check.size",
    "checkpoint.every_minutes": "checkpoint.every.minutes",
    **{f"rollout.vllm.{name}": f"rollout.engine.{name}" for name in ("servers", "folder", "devices", "memory", "args")},
}
"""Former settings that are parameters of another one's value now."""

WITHOUT = ("fixed", "builtin", "sampler")
"""Values of these others without parameters: the former settings had no effect."""


def with_parts(kind: type[Section], settings: dict[str, Any], *, section: str) -> dict[str, Any]:
    """A section's settings with former ones as parameters, except where they had no effect."""
    found = settings
    if isinstance(found.get("vllm"), dict):
        found = {**{f"vllm.{name}": value for name, value in found.pop("vllm").items()}, **found}
    for former, now in PARTS.items():
        if (name := former.removeprefix(f"{section}.")) in found:
            value, (owner, _, part) = found.pop(name), now.removeprefix(f"{section}.").partition(".")
            present = plain(found.get(owner, "builtin" if owner == "engine" else None))
            default = parameters_of(kind.model_fields[owner].annotation)[part].default
            if present not in WITHOUT and (value != default or isinstance(present, dict)):
                found[f"{owner}.{part}"] = value
    return found


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
        return {}  # the recorded setting had no effect
    if name == "value_gradient" and value == "head" and critic in ("auto", "shared"):
        return {"critic": "detached"}
    if name == "freeze_critic" and value == "attention" and critic == "separate":
        return {"critic": "frozen_attention"}
    raise ValueError(f"ppo.{name}={value} is now {FORMER[name][1]}; write that")


def without_rest(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert the former `rest` in the settings of `data` to the parameter of `draw`."""
    draw = settings.get("draw", "evenly")
    if "rest" not in settings or not isinstance(draw, str):
        return settings
    found = {name: value for name, value in settings.items() if name != "rest"}
    return {**found, "draw": {draw: settings["rest"]} if settings["rest"] else draw}
