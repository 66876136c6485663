"""What the Python functions are given, sorted: names go into the configuration, objects past it to the pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from kedge.config import Config, config_from_settings
from kedge.errors import ConfigError, DataError
from kedge.rewards import RewardSpec, RewardTerm

__all__ = ["Arguments", "Data", "StrPath", "Weighted"]

StrPath: TypeAlias = "str | os.PathLike[str]"
"""A folder, a file or a hub id."""

Data: TypeAlias = "StrPath | Iterable[Any]"
"""A file, folder or hub id, or a list: of texts, of rows, or of several files."""

Weighted: TypeAlias = "RewardSpec | RewardTerm | Sequence[RewardSpec | RewardTerm] | Mapping[RewardSpec, float]"
"""A reward model's folder or id, `module:function` or a function; several of them, or each with its weight."""


class Arguments:
    """The arguments of one call. Each method takes one of them and gives back what the configuration cannot hold.

    Args:
        settings: Fields of the configuration.
        named: Fields with arguments of their own; `policy` is another word for `model`, None leaves a field alone.

    Raises:
        ConfigError: A model that is not named by a text, or a field that is given twice.
    """

    def __init__(self, settings: Mapping[str, Any], **named: StrPath | None) -> None:
        self._settings = dict(settings)
        for word, value in named.items():
            self.name("model" if word == "policy" else word, value, word=word)

    def name(self, field: str, value: object, *, word: str = "") -> None:
        """A field that holds the name of a model or a folder."""
        if value is None:
            return
        if not isinstance(value, (str, os.PathLike)):
            raise ConfigError(
                f"{word or field} must be a folder or a hub id, not a {type(value).__name__}; save a model and its "
                "tokenizer with save_pretrained, and give that folder"
            )
        self._set(field, os.fspath(value))

    def rows(self, field: str, data: Data | None) -> list[Any] | None:
        """Rows or texts; None for the names of files, which the configuration holds.

        Raises:
            DataError: Neither names nor a list.
        """
        if isinstance(data, (str, os.PathLike)):
            self._set(field, [os.fspath(data)])
            return None
        if data is None:
            return None
        if isinstance(data, Mapping) or not isinstance(data, Iterable):
            raise DataError(f"{field} must be a file, a hub id or a list of rows, not a {type(data).__name__}")
        entries = list(data)
        named = (str, os.PathLike) if field == "data.comparisons" else os.PathLike
        if entries and all(isinstance(entry, named) for entry in entries):
            self._set(field, [os.fspath(entry) for entry in entries])
            return None
        return entries

    def function(self, field: str, judge: RewardSpec | None) -> Callable[..., Any] | None:
        """A Python function; None for a model or function that is named."""
        if callable(judge):
            return judge
        self.name(field, judge)
        return None

    def rewards(self, reward: Weighted) -> list[RewardSpec | RewardTerm] | None:
        """Rewards of which at least one is a Python function; None where all are named.

        Raises:
            ConfigError: Something that is no reward, or a weight that is no number.
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

    def config(self, stage: str) -> Config:
        """The configuration of a stage, when everything has been taken."""
        return config_from_settings(stage, self._settings)

    def _set(self, field: str, value: object) -> None:
        if field in self._settings:
            raise ConfigError(f"{field} is given twice: by an argument of its own, and among the settings")
        self._settings[field] = value


def _terms(reward: object) -> list[RewardTerm]:
    if isinstance(reward, Mapping):
        return [_weighted(spec, weight) for spec, weight in reward.items()]
    entries = reward if isinstance(reward, (list, tuple)) else [reward]
    return [entry if isinstance(entry, RewardTerm) else _weighted(entry, 1.0) for entry in entries]


def _weighted(spec: object, weight: object) -> RewardTerm:
    if not (isinstance(spec, (str, os.PathLike)) or callable(spec)):
        raise ConfigError(
            f"reward must be a folder, a hub id, 'module:function', a function, or several of them; not a "
            f"{type(spec).__name__}"
        )
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"the weight of a reward must be a number, not {weight!r}")
    return RewardTerm(os.fspath(spec) if isinstance(spec, os.PathLike) else spec, float(weight))
