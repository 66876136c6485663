"""Checks that a run's inputs exist before loading any: files, models, functions, and a chat template."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from kedge.config import Config
from kedge.data.sources import Sources, rows_of
from kedge.logs.loggers import check_loggers
from kedge.models import load_tokenizer
from kedge.models.sources import check_source
from kedge.runs.judges import check_judge
from kedge_base.errors import ConfigError, EnvError, RewardError
from kedge_base.importing import check_named
from kedge_base.stage import Stage, find_stage, value_of
from kedge_base.term_names import is_function
from kedge_base.texts import names_judge

ERRORS = {
    **dict.fromkeys(("rlhf.labeler", "reward", "evaluate.judge"), RewardError),
    "environment.source": EnvError,
    "ppo.advantage": ConfigError,
    "ppo.policy_loss": ConfigError,
}
"""Fields that may name code, with the error to raise. Reward fields may also name a model."""

FIELDS = (
    *("rlhf.labeler", "ppo.advantage", "ppo.policy_loss", "environment.source", "reward", "evaluate.judge"),
    *("model", "ppo.reference", "reward_model.base", "critic.base", "ppo.critic_init"),
    *("evaluate.against", "evaluate.frontier"),
    *("data.prompts", "data.eval_prompts", "data.pretraining", "data.comparisons", "data.demonstrations"),
)
"""Fields that name inputs, in the order of the checks: inputs that may have to be downloaded come last."""


def check_names(config: Config, stage: str, given: Collection[str] = ()) -> None:
    """Check that the loggers are installed and that all named inputs of a stage exist.

    Models that a chain will produce in its own folder are not checked.

    Args:
        config: The configuration.
        stage: The stage.
        given: Fields that Python objects replace.

    Raises:
        KedgeError: A name is wrong; the error is the same as when loading it.
    """
    check_loggers(config.runtime.loggers)
    out = _resolved(config.out or f"runs/{stage}")
    described = find_stage(stage)
    for field, name in _names(config, described):
        if field in given or name.startswith("python:") or _resolved(name).is_relative_to(out):
            continue
        error = ERRORS.get(field)
        if field.startswith("data."):
            next(rows_of(Sources((name,))), None)
        elif error is RewardError and names_judge(name):
            check_judge(name, config)
        elif error is not None and is_function(name):
            word = "reward" if error is RewardError else field.removesuffix(".source")
            check_named(name, word=word, error=error)
        elif error in (None, RewardError):
            check_source(name)
    template = config.data.chat_template
    if template and not os.path.isfile(os.path.expanduser(template)):  # may be one of the tokenizer's own
        source = str(described.starting_model(config))
        load_tokenizer(source, trust_remote_code=config.runtime.trust_remote_code, chat_template=template)


def _names(config: Config, stage: Stage) -> Iterator[tuple[str, str]]:
    """Yield the fields that a stage reads with this configuration, with each name in them."""
    for field in (field for field in FIELDS if field in _read(config, stage)):
        value = stage.starting_model(config) if field == "model" else value_of(config, field)
        for entry in value if isinstance(value, list) else [value]:
            if entry is not None:
                yield field, str(getattr(entry, "source", entry))


def _read(config: Config, stage: Stage) -> set[str]:
    """The fields that a stage reads with this configuration."""
    if config.evaluate.critic and "evaluate.critic" in stage.needs_with:
        return {"reward", "data.prompts"}  # the critic and its policy have been looked up
    is_chain = len(stage.trains) > 1
    unread = {
        "reward": any(flag.field == "reward" and flag.only_with for flag in stage.flags),
        "rlhf.labeler": config.rlhf.num_rounds == 1 or config.rlhf.asks_people,
        "critic.base": not config.critic.names_base or (is_chain and not config.rlhf.train_critic),
        "ppo.critic_init": is_chain or not config.ppo.names_critic,
        "evaluate.judge": stage.makes_model and config.ppo.eval_every.updates is None,
    }
    start = ["model"] if stage.starts_from else []
    return {field for field in (*stage.arguments.values(), *stage.inputs, *start) if not unread.get(field)}


def _resolved(name: str) -> Path:
    return Path(os.path.realpath(os.path.expanduser(name)))  # Path.resolve() raises at a link to itself
