"""Looks up the names of a run's inputs before any of them is loaded: files, models, functions, a chat template."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from kedge.config import Config
from kedge.data.sources import Sources, rows_of
from kedge.errors import ConfigError, EnvError, KedgeError, RewardError
from kedge.logs.loggers import check_loggers
from kedge.models import load_tokenizer
from kedge.models.sources import check_source
from kedge.system.importing import check_named
from kedge.system.stage import find_stage, value_of
from kedge.system.term_names import is_function

PPO = "model reward ppo.advantage ppo.policy_loss environment.source data.prompts data.eval_prompts data.pretraining"
READ = {
    "sft": "model data.demonstrations",
    "reward": "model reward_model.base data.comparisons data.demonstrations",
    "critic": "model reward data.prompts data.eval_prompts critic.base",
    "ppo": f"{PPO} ppo.reference ppo.critic_init evaluate.judge",
    "rlhf": f"{PPO} ppo.reference evaluate.judge data.comparisons data.demonstrations reward_model.base critic.base "
    "rlhf.labeler",
    "generate": "model reward environment.source data.prompts",
    "evaluate": "model environment.source data.prompts evaluate.judge evaluate.against evaluate.frontier",
    "evaluate.critic": "reward data.prompts",  # the critic and its policy have been looked up
}
"""By stage, the fields that name what it reads."""

CODE: Mapping[str, type[KedgeError]] = {
    "environment.source": EnvError,
    "ppo.advantage": ConfigError,
    "ppo.policy_loss": ConfigError,
}
"""Fields that may name code and name no model, with their error."""

SCORING = ("reward", "evaluate.judge", "rlhf.labeler")
"""Fields that may name a function or a model."""


def check_names(config: Config, stage: str) -> None:
    """Check that the loggers are installed and that everything exists that a stage reads by name.

    A chain makes models in its own folder, which are not looked for.

    Raises:
        KedgeError: A name is wrong; the same error as where it is loaded.
    """
    check_loggers(config.runtime.loggers)
    out = _resolved(config.out or f"runs/{stage}")
    for field, name in _names(config, stage):
        if name.startswith("python:") or _resolved(name).is_relative_to(out):
            continue
        if field.startswith("data."):
            next(rows_of(Sources((name,))), None)
        elif is_function(name) and field in (*CODE, *SCORING):
            word = "reward" if field in SCORING else field.removesuffix(".source")
            check_named(name, word=word, error=CODE.get(field, RewardError))
        elif field not in CODE:
            check_source(name)
    template = config.data.chat_template
    if template and not os.path.isfile(os.path.expanduser(template)):  # may be one of the tokenizer's own
        source = str(find_stage(stage).starting_model(config))
        load_tokenizer(source, trust_remote_code=config.runtime.trust_remote_code, chat_template=template)


def _names(config: Config, stage: str) -> Iterator[tuple[str, str]]:
    """The fields that a stage reads, each with a name in it."""
    unread = {
        "model": stage == "reward" and config.reward_model.base,
        "rlhf.labeler": config.rlhf.num_rounds == 1,
        "critic.base": stage == "rlhf" and not config.rlhf.train_critic,
        "evaluate.judge": stage != "evaluate" and config.ppo.eval_every is None,
    }
    read = READ.get("evaluate.critic" if stage == "evaluate" and config.evaluate.critic else stage, "")
    for field in (field for field in read.split() if not unread.get(field)):
        value = config.reward if field == "reward" else value_of(config, field)
        for entry in value if isinstance(value, list) else [value]:
            name = str(getattr(entry, "source", entry))
            if entry is not None and name not in ("auto", "reward", "policy"):  # words of `critic_init`
                yield field, name


def _resolved(name: str) -> Path:
    return Path(os.path.expanduser(name)).resolve()
