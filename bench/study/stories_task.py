"""Cheerful continuations of stories by a published model: needs files that the project does not have."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.study.task import Problem, Task

CRITIC: Final[dict[str, Any]] = {
    "critic.num_prompts": 2048,
    "critic.num_responses": 1,
    "critic.num_epochs": 2,
    "critic.batch_size": 32,
    "critic.learning_rate": 1e-3,
    "rollout.max_new_tokens": 48,
    "rollout.missing_eos_score": None,
    "data.max_prompt_tokens": 48,
    "runtime.precision": "fp32",
}
PREFIXES: Final = (4, 6, 8, 10, 12, 14)
"""Words of a story that its prompts consist of; six prompts of 1,961 stories are 11,000."""
HELD_OUT_WORDS: Final = 8
NUM_HELD_OUT: Final = 256


@dataclass(frozen=True)
class StoryFiles:
    """Folder of the files.

    Attributes:
        model: Folder of a story model.
        stories: Its prompts' stories: JSON lines with `text`.
        held_out: Stories of the evaluations.
        lexicon: Words and their mean valence, tab-separated, as VADER's.
    """

    model: Path
    stories: Path
    held_out: Path
    lexicon: Path


def stories_task(files: StoryFiles) -> Task:
    """The task on given files."""
    return Task(partial(_build, files), partial(_problem, files), CRITIC, __file__)


def _build(files: StoryFiles, folder: Path) -> None:
    shutil.copytree(files.model, folder / "model")


def _problem(files: StoryFiles, folder: Path) -> Problem:
    held_out = dict.fromkeys(_prefix(text, HELD_OUT_WORDS) for text in _texts(files.held_out))
    prompts = dict.fromkeys(_prefix(text, words) for text in _texts(files.stories) for words in PREFIXES)
    return Problem(
        folder / "model",
        prompts=[{"prompt": each} for each in prompts if each not in held_out],
        held_out=[{"prompt": each} for each in held_out][:NUM_HELD_OUT],
        reward=valence(files.lexicon),
        score="eval/score",
    )


def valence(lexicon: Path) -> Callable[..., list[float]]:
    """A reward function: the mean valence of a response's words; words that are not in the lexicon count 0.

    Args:
        lexicon: Words and their mean valence, tab-separated.
    """
    lines = (line.split("\t") for line in lexicon.read_text(encoding="utf-8").splitlines())
    worth = {parts[0]: float(parts[1]) for parts in lines if len(parts) > 1}

    def sentiment(completions: Sequence[str], **columns: Any) -> list[float]:
        return [_mean([worth.get(word, 0.0) for word in re.findall(r"[a-z']+", text.lower())]) for text in completions]

    return sentiment


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _prefix(text: str, words: int) -> str:
    return " ".join(text.split()[:words])


def _texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
