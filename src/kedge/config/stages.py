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
    if stage.check is not None:
        stage.check(config)
    if config.adapter.kind != "none" and not stage.adapts and needed == stage.needs:
        adapted = ", ".join(each.name for each in stages().values() if each.adapts)
        raise ConfigError(f"adapter.kind={config.adapter.kind} works for {adapted}, not for {name}")
    best_metric(config, name)
