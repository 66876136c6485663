"""Checks that a configuration is complete for a stage, before anything is loaded."""

from kedge.config.best_metric import best_metric
from kedge.config.presets import check_presets
from kedge.config.schema.root import Config
from kedge.errors import ConfigError
from kedge.system.stage import find_stage, stages, value_of


def check_stage(config: Config, name: str) -> None:
    """Check that the configuration is complete for a stage.

    Raises:
        ConfigError: Names the first missing field and its flag, or what does not fit.
    """
    stage = find_stage(name)
    needed = stage.needed(config)
    for field, flag in needed.items():
        is_given = stage.starting_model(config) if field in stage.starts_from else value_of(config, field)
        if not is_given:
            raise ConfigError(f"kedge {name} needs {field}: pass {flag}, or set it in the configuration")
    check_presets(config.preset, name)
    _check_rewards(config)
    if stage.check is not None:
        stage.check(config)
    if config.adapter.kind != "none" and not stage.adapts and needed == stage.needs:
        adapted = ", ".join(each.name for each in stages().values() if each.adapts)
        raise ConfigError(f"adapter.kind={config.adapter.kind} works for {adapted}, not for {name}")
    best_metric(config, name)


def _check_rewards(config: Config) -> None:
    """Refuse a reward that is given twice: its scores would count double. Python objects may share a name."""
    weights: dict[str, float] = {}
    for term in config.reward:
        key = f"{term.source} {term.settings}"
        if key in weights and term.weight and weights[key] and not term.source.startswith("python:"):
            total = weights[key] + term.weight
            raise ConfigError(f"reward {term.source} is given twice; give it once, with weight {total:g} if so meant")
        weights[key] = term.weight
