"""The settings of judges behind an API, and the check that they can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from kedge.config import Config
from kedge.rewards import RewardSpec, RewardTerm
from kedge_base.errors import ConfigError, RewardError
from kedge_base.importing import find_named
from kedge_base.run_folder.output import JUDGE_FILE, is_run
from kedge_base.texts import error_text, names_judge


def judge_settings(
    config: Config, folder: Path | None = None, *, rubric: str | None = None, **own: Any
) -> dict[str, Any]:
    """Return the arguments of `kedge_tasks.judge.Judge`, other than the judge's name.

    Args:
        config: Has the section `judge`.
        folder: The run's folder, where answers are kept; those of a chain's stages are in the chain's folder, so that
            its limits hold for all of them. None to keep answers in memory.
        rubric: The file of a term's own rubric.
        own: A term's other settings.

    Raises:
        ConfigError: A rubric cannot be read.
    """
    limits = config.judge.model_dump()
    text = ""
    path = rubric or limits["rubric"]
    if path is not None:
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"the judge's rubric {path} cannot be read: {error_text(error)}") from error
    del limits["rubric"]
    found = {"rubric": text, "max_tokens": limits.pop("max_tokens"), "limits": limits, **own}
    if folder is not None:
        chain = folder.parent
        found["file"] = str((chain if is_run(chain) else folder).absolute() / JUDGE_FILE)
    return found


def with_judges(rewards: Any, config: Config, folder: Path | None = None) -> list[RewardSpec | RewardTerm]:
    """Return rewards with the settings of judges behind an API.

    Args:
        rewards: One or several reward models and functions.
        config: Has the section `judge`.
        folder: The run's folder; None to keep answers in memory.
    """
    several = isinstance(rewards, Sequence) and not isinstance(rewards, str)
    given = cast("list[Any]", list(rewards) if several else [rewards])
    terms = [each if isinstance(each, RewardTerm) else RewardTerm(each) for each in given]
    return [
        replace(term, settings=judge_settings(config, folder, **term.settings))
        if isinstance(term.reward, str) and names_judge(term.reward)
        else term
        for term in terms
    ]


def check_judge(judge: str, config: Config) -> None:
    """Check that a judge can be asked: its name, its address and its key.

    Raises:
        RewardError: It cannot be.
        ConfigError: The rubric cannot be read.
    """
    check = find_named("kedge_tasks.judge:check_judge", word="judge", error=RewardError)
    check(judge, **judge_settings(config))
