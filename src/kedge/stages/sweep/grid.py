"""Which runs a sweep makes: every combination of the listed values, or random draws, each with every seed."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.config import Config
from kedge.errors import ConfigError

__all__ = ["Trial", "plan_trials", "split_override"]

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_OPENING, _CLOSING = "[{(", "]})"

LOG_RATIO = 10
"""A range of positive numbers that spans at least this factor is drawn from on a log scale."""

MAX_NAME = 120
"""Characters of a folder's name."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        name: Name of its folder.
        values: The values of the swept fields, as on the command line.
        seed: Its `runtime.seed`.
        config: Its whole configuration, without `out`.
    """

    name: str
    values: Mapping[str, str]
    seed: int
    config: Config

    @property
    def label(self) -> str:
        """The setting that it shares with the runs of other seeds."""
        return " ".join(f"{field}={value}" for field, value in self.values.items())


def split_override(override: str) -> tuple[str, list[str]]:
    """The field of `FIELD=VALUE,VALUE,…` and its values; commas inside brackets and quotes do not separate."""
    field, _, text = override.partition("=")
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in _OPENING) - (letter in _CLOSING) if not quote else 0
        if letter == "," and not quote and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return field.strip(), [value.strip() for value in values]


def plan_trials(
    swept: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    resolve: Callable[[Mapping[str, Any]], Config],
    *,
    num_random: int | None = None,
) -> list[Trial]:
    """All runs of a sweep, each with a checked configuration.

    Args:
        swept: The values of each swept field: a list, or one range `LOW..HIGH` to draw from.
        seeds: The seeds of each setting, distinct.
        resolve: The configuration with some fields set.
        num_random: Number of settings to draw; None tries every combination.

    Raises:
        ConfigError: There is nothing to vary, a range without `num_random`, or an invalid value.
    """
    if not swept and len(seeds) < 2:
        raise ConfigError(
            "nothing varies: give a field several values (ppo.learning_rate=1e-5,1e-4), or several --seeds"
        )
    for field, values in swept.items():
        if num_random is None and any(_RANGE.fullmatch(value) for value in values):
            raise ConfigError(f"{field}={','.join(values)} is a range; add --random N to draw N settings from it")
    settings = _combinations(swept) if num_random is None else _draws(swept, num_random)
    trials = [
        Trial(_name(values, seed, len(seeds)), values, seed, resolve({**values, "runtime.seed": str(seed)}))
        for values in settings
        for seed in seeds
    ]
    if len({trial.name for trial in trials}) < len(trials):
        raise ConfigError("two runs of the sweep are the same; give each value and each seed once")
    if trials[0].config.push.repo:
        raise ConfigError("a sweep pushes no model: leave push.repo unset, and push the best run with kedge push")
    return trials


def _combinations(swept: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    return [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]


def _draws(swept: Mapping[str, Sequence[str]], count: int) -> list[dict[str, str]]:
    """Distinct random settings, the same in every call; fewer if there are no more."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for attempt in range(20 * count):
        source = random.Random(f"sweep {attempt}")
        values = {field: _draw(choices, source) for field, choices in swept.items()}
        found.setdefault(tuple(values.values()), values)
        if len(found) == count:
            break
    return list(found.values())


def _draw(choices: Sequence[str], source: random.Random) -> str:
    choice = source.choice(choices)
    match = _RANGE.fullmatch(choice)
    if match is None:
        return choice
    low, high = sorted(map(float, match.groups()))
    if all(re.fullmatch(r"[-+]?\d+", end) for end in match.groups()):
        return str(source.randint(int(low), int(high)))
    if low > 0 and high / low >= LOG_RATIO:
        return f"{math.exp(source.uniform(math.log(low), math.log(high))):.3g}"
    return f"{source.uniform(low, high):.3g}"


def _name(values: Mapping[str, str], seed: int, num_seeds: int) -> str:
    """A folder's name: `learning_rate=1e-05_kl_coef=0.1_seed=0`."""
    parts = [f"{field.rpartition('.')[2]}={value}" for field, value in values.items()]
    name = re.sub(r"[^\w.=+-]+", "-", "_".join(parts)).strip("-.") or "run"
    if len(name) > MAX_NAME or re.sub(r"[\w.=+-]", "", "_".join(parts)):
        digest = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:8]
        name = f"{name[:MAX_NAME]}_{digest}"
    return f"{name}_seed={seed}" if num_seeds > 1 else name
