"""Counterparts of other libraries' arguments among kedge's fields: tables for the configuration and for the doctor."""

from __future__ import annotations

import re
from pathlib import Path

from kedge_base.texts import read_table

LIBRARIES: dict[str, dict[str, list[tuple[str, str]]]] = {}
for library, title, names, here in read_table(Path(__file__).with_suffix(".tsv")):
    LIBRARIES.setdefault(library, {}).setdefault(title, []).append((names, here))
"""By library and table: arguments as the library spells them, separated by spaces, and their counterpart as Markdown.

A counterpart that starts with a field in backticks is the answer; "none" means no counterpart. The table without a
title lists arguments without a counterpart, by reason.
"""

DEFAULTS: dict[tuple[str, str], dict[str, str]] = {}
for library, trainer, pairs in read_table(Path(__file__).with_name("library_defaults.tsv")):
    DEFAULTS.setdefault((library, trainer), {}).update(re.findall(r"([^\s=]+)=(\S+)", pairs))
"""By library and trainer: the defaults of arguments, as text."""

RULES = [
    (library, trainer, conditions.split(), settings.split("; ") if settings else [], remark)
    for library, trainer, conditions, settings, remark in read_table(Path(__file__).with_name("library_rules.tsv"))
]
"""What becomes something else: library, trainer, conditions, kedge's settings (`field=value`), and a remark. The file
says how to read them.
"""

NUMBERS = (
    "ppo.learning_rate",
    "ppo.critic_learning_rate",
    "ppo.kl_coef",
    "ppo.entropy_coef",
    "ppo.clip_range",
    "ppo.clip_range_high",
    "ppo.num_epochs",
    "ppo.num_minibatches",
    "ppo.gamma",
    "ppo.gae_lambda",
    "rollout.temperature",
    "rollout.num_prompts",
    "rollout.num_responses",
    "rollout.max_new_tokens",
    "sft.learning_rate",
    "sft.num_epochs",
    "reward_model.learning_rate",
    "reward_model.num_epochs",
)
"""Fields with the same unit in every library, unless the table says otherwise."""

OTHER_UNIT = re.compile(r"their product|divide|times `|instead of passes|optimizer steps|the quotient|of all processes")
"""In the table's words: a value that is not kedge's."""
