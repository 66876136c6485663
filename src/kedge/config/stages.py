"""Checks that a configuration is complete for a stage, and finds the metric that decides which checkpoint is best."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kedge.config.explain.describe import suggestion
from kedge.config.presets import check_presets
from kedge.config.schema.root import Config
from kedge_base.errors import ConfigError
from kedge_base.machine.invocation import as_argument
from kedge_base.stage import Stage, find_stage, stages, value_of
from kedge_base.term_names import distinct_names, source_name


def check_stage(config: Config, name: str) -> None:
    """Check that the configuration is complete for a stage.

    Raises:
        ConfigError: Names the first missing field and its flag, or the incompatible settings.
    """
    stage = find_stage(name)
    needed = stage.needed(config)
    for field, flag in needed.items():
        is_given = stage.starting_model(config) if field in stage.starts_from else value_of(config, field)
        if not is_given:
            how = as_argument(flag)
            raise ConfigError(f"kedge {name} needs {field}: pass {how}, or set it in the configuration")
    check_presets(config.preset, name)
    if stage.check is not None:
        stage.check(config)
    if config.adapter.kind != "none" and not stage.adapts and needed == stage.needs:
        adapted = ", ".join(each.name for each in stages().values() if each.adapts)
        raise ConfigError(f"adapter.kind={config.adapter.kind} works for {adapted}, not for {name}")
    best_metric(config, name)


class BestMetric(NamedTuple):
    """The metric that decides.

    Attributes:
        name: As in `metrics.jsonl`.
        higher_is_better: Its best value is the largest.
        is_kept: The best checkpoint is kept; otherwise the metric only serves `ppo.eval_patience`.
    """

    name: str
    higher_is_better: bool
    is_kept: bool = True


def best_metric(config: Config, name: str) -> BestMetric | None:
    """The metric of `checkpoint.keep_best` in a stage; None if no checkpoint is the best one.

    Raises:
        ConfigError: The stage has no such metric, or the run does not measure it.
    """
    stage = find_stage(name)
    wanted = config.checkpoint.keep_best
    evaluates = bool(evaluations_of(config, stage))
    if wanted in ("auto", "none") or not stage.best_metrics:
        if stage.best_by_default is None or not evaluates:
            return None
        return BestMetric(stage.best_by_default(config), higher_is_better=True, is_kept=wanted == "auto")
    _check(config, stage, wanted, evaluates=evaluates)
    return BestMetric(wanted, stage.best_metrics.get(wanted, True)) if stage.length else None


def evaluations_of(config: Config, stage: Stage) -> Any:
    """The value of the field without which the stage makes no evaluations; the first parameter of one with several."""
    value: Mapping[str, Any] | float | None = value_of(config, stage.evaluations) if stage.evaluations else None
    return next(iter(value.values())) if isinstance(value, Mapping) else value


def metric_in_chain(config: Config, name: str) -> str:
    """The value of `checkpoint.keep_best` for one stage of a chain: auto if the metric belongs to another stage."""
    wanted = config.checkpoint.keep_best
    return wanted if wanted == "none" or find_stage(name).is_best_metric(wanted) else "auto"


def _check(config: Config, stage: Stage, wanted: str, *, evaluates: bool) -> None:
    if not stage.is_best_metric(wanted):
        known = [f"{name}NAME" if name[-1] == "/" else name for name in stage.best_metrics]
        raise ConfigError(
            f"checkpoint.keep_best={wanted} is not a metric of {stage.name} that tells which model is better"
            f"{suggestion(wanted, known)}; choose auto, none, {', '.join(known)}"
        )
    of_terms = [name for name in stage.best_metrics if name[-1] == "/"]
    names = distinct_names([term.name or source_name(term.source) for term in config.reward])
    for name, term in zip(names, config.reward, strict=True):
        if term.weight < 0 and wanted in (f"{prefix}{name}" for prefix in of_terms):
            raise ConfigError(
                f"checkpoint.keep_best={wanted}: the weight of this term is negative, so that a lower score is better"
            )
    if wanted.startswith("eval/") and stage.evaluations and not evaluates:
        needed = "above 0" if stage.evaluations == "data.eval_fraction" else ""
        raise ConfigError(
            f"checkpoint.keep_best={wanted} is measured in evaluations: set {stage.evaluations} {needed}".rstrip()
        )
    if wanted == "eval/win_rate" and not config.evaluate.judge:
        raise ConfigError("checkpoint.keep_best=eval/win_rate needs a judge: set evaluate.judge")
