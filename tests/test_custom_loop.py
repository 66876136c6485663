"""The training loop of docs/api.md learns."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_causal_lm, tiny_tokenizer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"


def loop() -> Any:
    listings = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    listing = next(code for code in listings if code.startswith("import copy"))
    names: dict[str, Any] = {}
    exec(compile(listing, "api.md", "exec"), names)
    return names["train"]


@pytest.mark.filterwarnings("ignore:.*pad_token_id")
def test_a_tokenizer_without_a_pad_token_and_a_model_with_several_ends_will_do() -> None:
    tokenizer, policy, seen = tiny_tokenizer(), tiny_causal_lm(), list[str]()
    tokenizer.pad_token = None
    policy.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(3, 200)]

    def score(prompts: list[str], completions: list[str]) -> list[float]:
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        loop()(policy, tokenizer, ["The boat", "A sailor who went"] * 4, score, num_updates=1, max_new_tokens=8)
    assert len(seen) == 8
    # Responses go on behind the other ends, up to EOS or the limit; none has padding in it.
    assert max(map(len, seen)) >= 8
    assert not any("<eos>" in text for text in seen)


def test_the_loop_of_the_documentation_learns() -> None:
    means: list[float] = []

    def letters(prompts: list[str], completions: list[str]) -> list[float]:
        scores = [float(sum(letter.islower() for letter in text)) for text in completions]
        means.append(sum(scores) / len(scores))
        return scores

    prompts = ["The boat", "A sailor who", "My rope", "Once"] * 8
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"num_updates": 12, "learning_rate": 4e-3, "max_new_tokens": 8}
        loop()(tiny_causal_lm(), tiny_tokenizer(), prompts, letters, **sizes)
    assert len(means) == 12
    assert sum(means[-3:]) > 2 * sum(means[:3]) > 0
