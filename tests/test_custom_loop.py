"""The training loop of docs/custom.md learns."""

import re
from pathlib import Path
from typing import Any

import torch

from tests.tiny import tiny_causal_lm, tiny_tokenizer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "custom.md"


def test_the_loop_of_the_documentation_learns() -> None:
    listing = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(listing, "custom.md", "exec"), names)
    means: list[float] = []

    def letters(prompts: list[str], completions: list[str]) -> list[float]:
        scores = [float(sum(letter.islower() for letter in text)) for text in completions]
        means.append(sum(scores) / len(scores))
        return scores

    prompts = ["The boat", "A sailor who", "My rope", "Once"] * 8
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"num_updates": 12, "learning_rate": 4e-3, "max_new_tokens": 8}
        names["train"](tiny_causal_lm(), tiny_tokenizer(), prompts, letters, **sizes)
    assert len(means) == 12
    assert sum(means[-3:]) > 2 * sum(means[:3]) > 0
