"""Judges behind an API: their settings, and the check that they can be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.config import Config, with_values
from kedge.rewards.loading import RewardSpec, RewardTerm, terms_of
from kedge_base.errors import ConfigError, RewardError
from kedge_base.importing import find_named
from kedge_base.run_folder.output import JUDGE_FILE
from kedge_base.texts import error_text, names_judge


def judge_settings(config: Config, folder: Path | None = None, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of `kedge_tasks.judge.Judge`, other than the judge's name.

    Args:
        config: Has the section `judge`.
        folder: Where answers are kept, see `Run.judge_folder`; None to keep them in memory.
        own: A term's own settings: `ranks`, and fields of the section.

    Raises:
        ConfigError: A setting of the term is wrong, or a rubric cannot be read.
    """
    fields = dict(own or {})
    ranks = fields.pop("ranks", False)
    limits = with_values(config, {f"judge.{name}": value for name, value in fields.items()}).judge.model_dump()
    path = limits.pop("rubric")
    try:
        rubric = Path(path).expanduser().read_text(encoding="utf-8") if path else ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"the judge's rubric {path} cannot be read: {error_text(error)}") from error
    return {
        "rubric": rubric,
        "ranks": ranks,
        "max_tokens": limits.pop("max_tokens"),
        "limits": limits,
        "file": folder and str(folder.absolute() / JUDGE_FILE),
    }


def with_judges(
    rewards: RewardSpec | RewardTerm | Sequence[RewardSpec | RewardTerm], config: Config, folder: Path | None = None
) -> list[RewardTerm]:
    """Return rewards with the settings of judges behind an API; arguments as in `judge_settings`."""
    return [
        replace(term, settings=judge_settings(config, folder, term.settings))
        if isinstance(term.reward, str) and names_judge(term.reward)
        else term
        for term in terms_of(rewards)
    ]


def open_judge(judge: str, config: Config, folder: Path | None = None) -> Any:
    """Open a judge behind an API, as a `kedge_tasks.judge.Judge`; arguments as in `judge_settings`.

    Raises:
        RewardError: Its name is wrong, or its key cannot be sent.
        ConfigError: The rubric cannot be read.
    """
    opened = find_named("kedge_tasks.judge:Judge", word="judge", error=RewardError)
    return opened(judge, **judge_settings(config, folder))


def check_judge(judge: str, config: Config) -> None:
    """Check that a judge can be asked: its name, its address, its key and its model.

    Raises:
        RewardError: It cannot be.
        ConfigError: The rubric cannot be read.
    """
    open_judge(judge, config).endpoint.check()
