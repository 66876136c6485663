"""The functions of `kedge` that use trained models: one per stage, and the sweep."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, cast

from kedge.api import answering, answering_for, run_stage
from kedge.config import Config, check_stage, config_from_settings, full_settings, parse_value
from kedge.rewards import RewardSpec
from kedge.runs.loaded_models import LoadedModel
from kedge.stages.arguments import Data, Model, StrPath, Weighted, check_whole, read_argument
from kedge_base.errors import ConfigError
from kedge_base.run_folder.output import check_creatable, folder_of
from kedge_base.stage import stages

if TYPE_CHECKING:
    from kedge_lab.check_critic import CriticCheckResult
    from kedge_lab.evaluate import EvaluateResult, PassResult
    from kedge_lab.generate import GenerateResult
    from kedge_lab.sweep import SweepResult


@answering
def generate(
    *,
    model: Model,
    prompts: Data,
    reward: Weighted | None = None,
    environment: Callable[[], Any] | str | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> GenerateResult:
    """Sample and optionally score responses to prompts; see `kedge_lab.generate.run_generate`.

    Args:
        model: Folder or hub id of the policy.
        prompts: As in `ppo`.
        reward: As in `ppo`.
        environment: As in `ppo`; the responses are episodes with it.
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `temperature` or `best_of`.
    """
    return run_stage("generate", locals())


@answering
def evaluate(
    *,
    model: Model,
    prompts: Data,
    judge: RewardSpec | LoadedModel | None = None,
    against: Model | None = None,
    environment: Callable[[], Any] | str | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> EvaluateResult:
    """Measure a policy's win rate against another policy or references; see `kedge_lab.evaluate.run_evaluate`.

    Args:
        model: Folder or hub id of the policy.
        prompts: As in `ppo`.
        judge: A reward model or a reward function; with `judge_mode="pairwise"` a function that compares two responses.
        against: Folder or hub id of the policy to compare with; None for the references in the data (the columns
            `completion`, `chosen` or `summary`).
        environment: As in `ppo`: episodes are compared, by their rewards unless there is a judge.
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `judge_mode`.
    """
    return run_stage("evaluate", locals())


@answering_for("evaluate")
def pass_at_k(
    *,
    model: Model,
    prompts: Data,
    judge: RewardSpec | LoadedModel | None = None,
    num_responses: int = 8,
    against: Model | None = None,
    environment: Callable[[], Any] | str | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> PassResult:
    """Measure how many prompts a policy solves with k responses; see `kedge_lab.evaluate.run_pass_at_k`.

    Args:
        model: Folder or hub id of the policy.
        prompts: As in `ppo`.
        judge: A function such as `kedge_tasks.verify:gsm8k`, that scores right responses 1. Optional with an
            environment.
        num_responses: Responses to each prompt, at least 2: the largest k.
        against: Folder or hub id of another policy to measure.
        environment: As in `ppo`: an episode with a reward of 1 or more is right.
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `generate.temperature`.
    """
    check_whole("num_responses", num_responses, least=2)
    return run_stage("evaluate", locals())


@answering_for("evaluate")
def check_critic(
    *,
    critic: StrPath,
    prompts: Data,
    model: Model | None = None,
    reward: Weighted | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> CriticCheckResult:
    """Compare a critic's values of prefixes with the returns of fresh continuations; see `run_check_critic`.

    Args:
        critic: A run of PPO or of `critic`, or a trained critic (folder or hub id).
        prompts: As in `ppo`.
        model: The policy, for a critic that does not belong to a run.
        reward: As in `ppo`, instead of the run's.
        out: The run's folder; must be empty.
        settings: Fields of the configuration, such as `evaluate.num_prompts`.
    """
    if critic is None:
        raise ConfigError("critic is missing: name a run of PPO or of critic, or a trained critic")
    return run_stage("evaluate", locals())


def sweep(
    stage: str,
    fields: Mapping[str, Sequence[object]],
    *,
    model: Model | None = None,
    demonstrations: Data | None = None,
    comparisons: Data | None = None,
    prompts: Data | None = None,
    reward: Weighted | None = None,
    seeds: int | Sequence[int] | None = None,
    num_random: int | None = None,
    num_processes: int | None = None,
    metric: str | None = None,
    goal: str | None = None,
    out: StrPath | None = None,
    **settings: Any,
) -> SweepResult:
    """Run a stage with several settings and seeds, and compare them; see `kedge_lab.sweep.run_sweep`.

    The runs are separate processes, so data, rewards and models are given by name.

    Args:
        stage: sft, reward, critic, ppo or control.
        fields: The values to try, by dotted name; with `num_random` also a range, `["1e-6..1e-4"]`.
        model: As in the stage's function.
        demonstrations: See `model`.
        comparisons: See `model`.
        prompts: See `model`.
        reward: See `model`.
        seeds: Number of seeds for each setting, or the seeds; None uses `runtime.seed`.
        num_random: Number of settings to draw; None tries every combination.
        num_processes: Runs at a time; None for one per core on a CPU, one on a GPU.
        metric: The metric to compare by; None for the stage's usual one.
        goal: `max` or `min`; None to go by the metric's name.
        out: The sweep's folder; `runs/sweep-STAGE` by default. The same call continues the sweep in it.
        settings: Fields of the configuration that all runs share.
    """
    swept = [each.name for each in stages().values() if each.is_swept]
    if stage not in swept:
        raise ConfigError(f"a sweep runs {', '.join(swept)}, not {stage!r}")
    if not isinstance(fields, Mapping) or not all(isinstance(field, str) for field in fields):
        raise ConfigError(f"fields must be a mapping from fields to lists of values to try; it is {fields!r}")
    for name, value in (("num_random", num_random), ("num_processes", num_processes)):
        if value is not None:
            check_whole(name, value, least=1)
    if goal not in (None, "max", "min") or not isinstance(metric, (str, type(None))):
        raise ConfigError(f"metric must be the name of one, and goal max or min; they are {metric!r} and {goal!r}")
    from kedge_lab.sweep import plan_trials, run_sweep

    given: dict[str, Any] = {
        "model": model,
        "data.demonstrations": demonstrations,
        "data.comparisons": comparisons,
        "data.prompts": prompts,
        "reward": reward,
    }
    parts: list[Mapping[str, Any]] = [settings]
    for field, value in ((field, value) for field, value in given.items() if value is not None):
        values, kept = read_argument(field, value, field)
        if kept is not None:
            raise ConfigError(f"the runs of a sweep are separate processes: {field} must be a file or folder, by name")
        parts.append(values)
    shared = full_settings(stage, *parts)
    full_settings(stage, *({name: values} for name, values in fields.items()))  # refuses a field under two names

    def resolve(values: Mapping[str, str]) -> Config:
        config = config_from_settings(stage, shared, {name: parse_value(text, name) for name, text in values.items()})
        check_stage(config, stage)
        return config

    swept_texts = {field: _as_texts(field, values) for field, values in fields.items()}
    trials = plan_trials(swept_texts, _seeds(seeds), resolve, num_random=num_random)
    out = f"runs/sweep-{stage}" if out is None else out
    folder_of(out, "out")  # refuses a value that is not a path
    folder = check_creatable(out)
    return run_sweep(trials, stage, folder, num_processes=num_processes, metric=metric, goal=goal)


def _as_texts(field: str, values: object) -> list[str]:
    """Write values as on the command line, where a text such as `null` needs quotes.

    Raises:
        ConfigError: The values are not in a list, or one cannot be written, such as a function.
    """
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ConfigError(f"{field} must be a list of values to try; it is {values!r}")
    try:
        return [_as_text(value, field) for value in cast("Iterable[object]", values)]
    except TypeError:
        raise ConfigError(f"{field}: the runs of a sweep are separate processes; {values!r} is not text") from None


def _as_text(value: object, field: str) -> str:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    with suppress(ConfigError):  # invalid YAML needs quotes too
        if isinstance(value, str) and parse_value(value, field) == value:
            return value
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """Convert a path or a NumPy number to a JSON type."""
    return os.fspath(value) if isinstance(value, os.PathLike) or not hasattr(value, "tolist") else value.tolist()


def _seeds(seeds: int | Sequence[int] | None) -> Sequence[int] | None:
    """Return the seeds; a number means that many seeds, from 0."""
    if seeds is None:
        return None
    try:
        return range(index(seeds)) if isinstance(seeds, Integral) else [index(seed) for seed in cast("Any", seeds)]
    except TypeError:
        raise ConfigError(f"seeds must be a number of seeds or a list of them; it is {seeds!r}") from None
