"""Scheduled fields: values that change during a PPO run, linearly between given updates."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from pydantic import ValidationError

from kedge.config.explain.describe import suggestion, written
from kedge.config.schema.field import Choice
from kedge.config.schema.root import Config
from kedge_base.errors import ConfigError

SCHEDULABLE = (
    "optimization.max_grad_norm",
    "ppo.clip_range",
    "ppo.clip_range_high",
    "ppo.early_stop_kl",
    "ppo.entropy_coef",
    "ppo.gae_lambda",
    "ppo.gamma",
    "ppo.old_logprobs.cap",
    "ppo.kl_coef",
    "ppo.learning_rate",
    "ppo.num_epochs",
    "ppo.positive_nll_coef",
    "ppo.value_clip_range",
    "ppo.value_coef",
    "ppo.value_gae_lambda",
    "rollout.max_new_tokens",
    "rollout.temperature",
)
"""The fields that are read in every update, so that a schedule takes effect."""

_WHOLE = ("ppo.num_epochs", "rollout.max_new_tokens")


def scheduled_values(config: Config, update: int) -> dict[str, float]:
    """The values of the scheduled fields in an update, by dotted name.

    Linear between two points, constant before the first and after the last; whole numbers are rounded, but shares of an
    epoch are not.
    """
    values = {field: _interpolated(points, update) for field, points in config.schedules.items()}
    return {field: round(value) if field in _WHOLE and value >= 1 else value for field, value in values.items()}


def config_at(config: Config, update: int) -> Config:
    """The configuration of an update, with the scheduled fields at their values for that update."""
    return _with(config, scheduled_values(config, update)) if config.schedules else config


def epochs_of(config: Config, num_updates: int) -> list[float]:
    """List `ppo.num_epochs` in the first updates of a run."""
    name = "ppo.num_epochs"
    if name not in config.schedules:
        return [config.ppo.num_epochs] * num_updates
    return [scheduled_values(config, update)[name] for update in range(1, num_updates + 1)]


def count_epochs(config: Config, num_updates: int) -> int:
    """Count the epochs in the first updates of a run, those on a share of the responses included."""
    return sum(map(ceil, epochs_of(config, num_updates)))


def mean_epochs(config: Config) -> float:
    """Average the passes over all responses per update over a run; 0 for a run without updates."""
    return sum(epochs_of(config, config.ppo.num_updates)) / max(1, config.ppo.num_updates)


def check_schedules(config: Config, describe: Callable[[ValidationError], str]) -> None:
    """Reject schedules of fields that cannot change during a run, and values that a run without schedules could not
    have.

    Args:
        config: The configuration.
        describe: Formats the reason why a configuration is rejected.

    Raises:
        ConfigError: One line with the first mistake.
    """
    if "ppo.value_clip_range" in config.schedules and config.ppo.value_bins:
        raise ConfigError("schedules: ppo.value_loss=hl_gauss has no value clip; remove ppo.value_clip_range")
    for field, points in config.schedules.items():
        if field not in SCHEDULABLE:
            raise ConfigError(
                f"schedules: {written(field)} cannot be scheduled{suggestion(field, SCHEDULABLE)}; "
                f"the fields that can: {', '.join(SCHEDULABLE)}"
            )
        if not points or min(points) < 1:
            raise ConfigError(f"schedules: {field} needs one or more points, update: value, with updates from 1")
        for update, value in points.items():
            try:
                _with(config, {field: int(value) if field in _WHOLE and value == int(value) else value})
            except ValidationError as error:
                raise ConfigError(f"schedules: at update {update}, {describe(error)}") from None
    _check_conflicts(config)


def _check_conflicts(config: Config) -> None:
    """Reject schedules of fields that a controller or a stage-specific value sets, or that are fixed at the start."""
    ppo, schedules = config.ppo, config.schedules
    own = config.optimization.stages.get("ppo", {})
    others = {
        "optimization.max_grad_norm": "optimization.stages.ppo.max_grad_norm" if "max_grad_norm" in own else "",
        "ppo.kl_coef": f"ppo.kl_controller={ppo.kl_controller}" if ppo.kl_controller.name != "fixed" else "",
        "ppo.entropy_coef": f"ppo.entropy_target={ppo.entropy_target}" if ppo.entropy_target else "",
        "ppo.gae_lambda": "ppo.gae_lambda=length_adaptive" if isinstance(ppo.gae_lambda, Choice) else "",
    }
    for field in schedules:
        if others.get(field):
            raise ConfigError(f"schedules: {field} is also set by {others[field]}; remove one of the two")
    if "ppo.kl_coef" in schedules and not ppo.needs_reference:
        raise ConfigError(
            "schedules: with ppo.kl_coef=0 no reference model is loaded, so it cannot be scheduled; set ppo.kl_coef to "
            "its largest value, or ppo.measure_kl=true"
        )
    longest = max(schedules.get("rollout.max_new_tokens", {0: 0}).values())
    if longest > config.rollout.max_new_tokens:
        raise ConfigError(
            f"schedules: rollout.max_new_tokens reaches {longest:g}, but prompts are chosen to leave room for "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}; set that field to the largest value"
        )


def _with(config: Config, values: Mapping[str, float]) -> Config:
    """A copy with new values. Raises pydantic's `ValidationError`."""
    settings: dict[str, Any] = config.model_dump()
    for field, value in values.items():
        section, _, name = field.partition(".")
        settings[section][name] = value
    return Config.model_validate(settings)


def _interpolated(points: Mapping[int, float], update: int) -> float:
    updates = sorted(points)
    place = bisect_right(updates, update)
    if place in (0, len(updates)):
        return points[updates[max(place - 1, 0)]]
    before, after = updates[place - 1], updates[place]
    share = (update - before) / (after - before)
    return points[before] + share * (points[after] - points[before])
