"""Faulty tools and agents, on the model of examples/calculator."""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from typing import Any, Final

from bench.faults.base import SHARED, Base
from bench.faults.case import Rows

CALCULATOR: Final = Path(__file__).parents[2] / "examples" / "calculator" / "calculator.py"
SETTINGS: Final[dict[str, Any]] = {
    **SHARED,
    "environment.max_turns": 2,
    "environment.max_turn_tokens": 30,
    "data.max_prompt_tokens": 16,
    "rollout.max_new_tokens": 200,
    "rollout.missing_eos_score": None,
    "ppo.kl_coef": 0.0,
}


class Broken:
    """A tool that fails."""

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        raise ConnectionError("the calculator is switched off")


class Slow:
    """A tool that often takes longer than the limit."""

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        time.sleep(2.0 * (a % 3 > 0))
        return a * b


class Unknown:
    """A tool that the policy has never seen."""

    def product(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a * b


async def changing(row: Any, client: Any) -> float:
    """Asks twice, and shows the policy its first answer with a mark that it did not write."""
    messages = [*row["messages"]]
    answer = ""
    for _ in range(2):
        asked = await client.chat.completions.create(model="policy", messages=messages)
        answer = asked.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": f"{answer}!"}, {"role": "user", "content": "Again?"}]
    return float(answer == row["answer"])


def right(base: Base) -> list[dict[str, Any]]:
    """The reward of the example."""
    return [{"source": f"{CALCULATOR}:right"}]


def unpaid(base: Base) -> list[dict[str, Any]]:
    """No reward besides the environment's."""
    return []


def calculator(base: Base) -> Path:
    """The folder of the example's model; trained once."""
    folder = base.folder / "calculator"
    if not folder.is_dir():
        runpy.run_path(str(CALCULATOR))["main"](folder)
    return folder / "start" / "model"


def products(prompts: Rows) -> Rows:
    """The example's prompts instead of the base's."""
    found: Rows = runpy.run_path(str(CALCULATOR))["products"]()
    return found[: len(prompts)]
