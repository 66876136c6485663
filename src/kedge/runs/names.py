"""Looks up the names of a run's inputs before any of them is loaded: files, models, functions, a chat template."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from kedge.config import Config
from kedge.data.sources import Sources, rows_of
from kedge.logs.loggers import check_loggers
from kedge.models import load_tokenizer
from kedge.models.sources import check_source
from kedge_base.errors import ConfigError, EnvError, RewardError
from kedge_base.importing import check_named
from kedge_base.stage import find_stage, value_of
from kedge_base.term_names import is_function

PPO = "ppo.advantage ppo.policy_loss environment.source reward evaluate.judge model ppo.reference data.prompts"
READ = {
    "sft": "model data.demonstrations",
    "reward": "model data.comparisons data.demonstrations",
    "critic": "reward model critic.base data.prompts data.eval_prompts",
    "ppo": f"{PPO} ppo.critic_init data.eval_prompts data.pretraining",
    "rlhf": f"rlhf.labeler {PPO} reward_model.base critic.base data.eval_prompts data.pretraining data.comparisons "
    "data.demonstrations",
    "generate": "environment.source reward model data.prompts",
    "evaluate": "environment.source evaluate.judge model evaluate.against evaluate.frontier data.prompts",
    "evaluate.critic": "reward data.prompts",  # the critic and its policy have been looked up
}
"""By stage, the fields that name what it reads; what may have to be downloaded is last."""

ERRORS = {
    **dict.fromkeys(("reward", "evaluate.judge", "rlhf.labeler"), RewardError),
    "environment.source": EnvError,
    "ppo.advantage": ConfigError,
    "ppo.policy_loss": ConfigError,
}
"""The fields that may name code, with their errors. Those of rewards may also name a model."""


def check_names(config: Config, stage: str, given: Collection[str] = ()) -> None:
    """Check that the loggers are installed and that everything exists that a stage reads by name.

    A chain makes models in its own folder, which are not looked for.

    Args:
        config: The configuration.
        stage: The stage.
        given: Fields in whose place there are Python objects.

    Raises:
        KedgeError: A name is wrong; the same error as where it is loaded.
    """
    check_loggers(config.runtime.loggers)
    out = _resolved(config.out or f"runs/{stage}")
    for field, name in _names(config, stage):
        if field in given or name.startswith("python:") or _resolved(name).is_relative_to(out):
            continue
        error = ERRORS.get(field)
        if field.startswith("data."):
            next(rows_of(Sources((name,))), None)
        elif error is not None and is_function(name):
            word = "reward" if error is RewardError else field.removesuffix(".source")
            check_named(name, word=word, error=error)
        elif error in (None, RewardError):
            check_source(name)
    template = config.data.chat_template
    if template and not os.path.isfile(os.path.expanduser(template)):  # may be one of the tokenizer's own
        source = str(find_stage(stage).starting_model(config))
        load_tokenizer(source, trust_remote_code=config.runtime.trust_remote_code, chat_template=template)


def _names(config: Config, stage: str) -> Iterator[tuple[str, str]]:
    """The fields that a stage reads, each with a name in it."""
    unread = {
        "rlhf.labeler": config.rlhf.num_rounds == 1,
        "critic.base": stage == "rlhf" and not config.rlhf.train_critic,
        "evaluate.judge": stage != "evaluate" and config.ppo.eval_every is None,
    }
    read = READ.get("evaluate.critic" if stage == "evaluate" and config.evaluate.critic else stage, "")
    for field in (field for field in read.split() if not unread.get(field)):
        value = find_stage(stage).starting_model(config) if field == "model" else value_of(config, field)
        for entry in value if isinstance(value, list) else [value]:
            name = str(getattr(entry, "source", entry))
            if entry is not None and name not in ("auto", "reward", "policy"):  # words of `critic_init`
                yield field, name


def _resolved(name: str) -> Path:
    return Path(os.path.realpath(os.path.expanduser(name)))  # Path.resolve() raises at a link to itself
