"""Arguments of the Python functions: names go into the configuration, in-memory objects directly to the pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from kedge.config import Config, config_from_settings, initial_critic
from kedge.data.records import table_rows
from kedge.errors import ConfigError
from kedge.loaded_model import LoadedModel, is_pretrained
from kedge.rewards import RewardSpec, RewardTerm

__all__ = ["Arguments", "Data", "Model", "StrPath", "Weighted"]

StrPath: TypeAlias = "str | os.PathLike[str]"
"""A folder, a file or a hub id."""

Model: TypeAlias = "StrPath | LoadedModel | tuple[Any, Any]"
"""A model's folder or hub id; or the model and its tokenizer, loaded, also as a pair."""

LOADED = "kedge.LoadedModel(model, tokenizer)"

Data: TypeAlias = "StrPath | Iterable[Any]"
"""A file, folder or hub id; a list of texts, rows or files; a `Dataset`, `DatasetDict` or pandas DataFrame."""

Reward: TypeAlias = "RewardSpec | LoadedModel | RewardTerm"
Weighted: TypeAlias = "Reward | Sequence[Reward] | Mapping[RewardSpec | LoadedModel, float]"
"""A reward model by name or loaded, `module:function`, or a function; a list of them, or a mapping to weights."""


class Arguments:
    """The arguments of one call. Each method takes one argument and returns what the configuration cannot hold.

    Args:
        settings: Fields of the configuration.
        named: Fields with their own argument; `policy` sets `model`, None leaves the field unset.

    Raises:
        ConfigError: A model is not given by name, or a field is given twice.
    """

    def __init__(self, settings: Mapping[str, Any], **named: Model | None) -> None:
        self._settings = dict(settings)
        if named.get("model") is not None and named.get("policy") is not None:
            raise ConfigError("model and policy are two names of the same argument; give one of them")
        for word, value in named.items():
            self.name("model" if word == "policy" else word, value, word=word)

    def name(self, field: str, value: object, *, word: str = "") -> None:
        """Set a field that holds the name of a model or a folder."""
        if value is None:
            return
        if not isinstance(value, (str, os.PathLike)):
            raise ConfigError(f"{word or field} must be a folder, a hub id or {LOADED}, not {_shown(value)}")
        self._set(field, os.fspath(value))

    def critic(self, critic: Model | None) -> None:
        """Set the kind of critic of PPO, or the trained critic that it starts from."""
        if not isinstance(critic, str):
            self.name("ppo.critic_init", critic, word="critic")
            return
        for field, name in initial_critic(critic).items():
            self._set(field, name)

    def rows(self, field: str, data: Data | None) -> list[Any] | None:
        """Rows or texts; None for names of files, which go into the configuration.

        Raises:
            DataError: The value is neither a name nor a table.
        """
        if isinstance(data, (str, os.PathLike)):
            self._set(field, [os.fspath(data)])
            return None
        if data is None:
            return None
        entries = list(table_rows(data, field))
        named = (str, os.PathLike) if field == "data.comparisons" else os.PathLike
        if entries and all(isinstance(entry, named) for entry in entries):
            self._set(field, [os.fspath(entry) for entry in entries])
            return None
        return entries

    def function(self, field: str, judge: RewardSpec | LoadedModel | None) -> Callable[..., Any] | None:
        """A Python function; None for a model or function given by name."""
        if callable(judge) and not is_pretrained(judge):
            return judge
        self.name(field, judge, word=field.rpartition(".")[2])
        return None

    def rewards(self, reward: Weighted) -> list[RewardSpec | RewardTerm] | None:
        """Rewards, if at least one is a Python function; None if all are given by name.

        Raises:
            ConfigError: An entry is not a reward, or a weight is not a number.
        """
        terms = _terms(reward)
        if any(callable(term.reward) for term in terms):
            return list(terms)
        self._set(
            "reward",
            [
                {
                    "source": os.fspath(term.reward),
                    "weight": term.weight,
                    "settings": dict(term.settings),
                    "name": term.name,
                }
                for term in terms
                if not callable(term.reward)
            ],
        )
        return None

    def config(self, stage: str, values: Mapping[str, Any] | None = None) -> Config:
        """The configuration of a stage from all arguments so far, and from further values."""
        return config_from_settings(stage, self._settings, values or {})

    def _set(self, field: str, value: object) -> None:
        if field in self._settings:
            raise ConfigError(f"{field} is given twice: by its own argument and as a setting")
        self._settings[field] = value


def _shown(value: object) -> str:
    """A value of the wrong type, for an error."""
    alone = " without its tokenizer" if is_pretrained(value) and hasattr(value, "forward") else ""
    return f"a {type(value).__name__}{alone}"


def _terms(reward: object) -> list[RewardTerm]:
    if isinstance(reward, Mapping):
        return [_weighted(spec, weight) for spec, weight in reward.items()]
    entries = reward if isinstance(reward, (list, tuple)) else [reward]
    return [entry if isinstance(entry, RewardTerm) else _weighted(entry, 1.0) for entry in entries]


def _weighted(spec: object, weight: object) -> RewardTerm:
    if is_pretrained(spec) or not (isinstance(spec, (str, os.PathLike)) or callable(spec)):
        raise ConfigError(
            f"reward must be a folder, a hub id, 'module:function', a function, {LOADED}, or a list of these; not "
            f"{_shown(spec)}"
        )
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"the weight of a reward must be a number, not {weight!r}")
    return RewardTerm(os.fspath(spec) if isinstance(spec, os.PathLike) else spec, float(weight))
