"""Sorting digits on a scratchpad: a character model of 0.1 million parameters learned it from careless writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import kedge
from bench.study.sorting import character_tokenizer, demonstrations, numbers, verify
from bench.study.task import QUIET, Problem, Task
from kedge.models.untrained import save_untrained_llama

MODEL: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "context_length": 64,
    "initializer_range": 0.05,
}
SFT: Final[dict[str, Any]] = {
    "sft.learning_rate": 4e-3,
    "sft.batch_size": 32,
    "sft.num_epochs": 2,
    "sft.schedule": {"cosine": 0.05},
    "data.eval_fraction": 0.04,
    "data.max_prompt_tokens": 16,
    "data.max_length": 64,
    "runtime.precision": "fp32",
}
CRITIC: Final[dict[str, Any]] = {
    "critic.num_prompts": 4096,
    "critic.num_responses": 1,
    "critic.num_epochs": 4,
    "critic.batch_size": 32,
    "critic.learning_rate": 1e-3,
    "rollout.max_new_tokens": 48,
    "data.max_prompt_tokens": 16,
    "runtime.precision": "fp32",
}
NUM_DEMONSTRATIONS: Final = 12_000
NUM_PROMPTS: Final = 40_000
"""More than a run sees: with 6,000 PPO learned them by heart (82 % of those, 72 % of held-out ones)."""
NUM_HELD_OUT: Final = 256
HELD_OUT_SEED = 1
PROMPTS_SEED = 2
DEMONSTRATIONS_SEED = 3


def _build(folder: Path) -> None:
    save_untrained_llama(folder / "start", character_tokenizer(), **MODEL, seed=0)
    prompts = numbers(NUM_DEMONSTRATIONS, seed=DEMONSTRATIONS_SEED, without=_held_out())
    rows = demonstrations(prompts, seed=DEMONSTRATIONS_SEED)
    kedge.sft(model=folder / "start", demonstrations=rows, out=folder / "sft", **QUIET, **SFT)


def _problem(folder: Path) -> Problem:
    held_out = _held_out()
    return Problem(
        folder / "sft" / "model",
        prompts=[{"prompt": each} for each in numbers(NUM_PROMPTS, seed=PROMPTS_SEED, without=held_out)],
        held_out=[{"prompt": each} for each in held_out],
        reward=verify,
        score="eval/score",
    )


def _held_out() -> list[str]:
    return numbers(NUM_HELD_OUT, seed=HELD_OUT_SEED)


SORT: Final = Task(_build, _problem, CRITIC, __file__)
