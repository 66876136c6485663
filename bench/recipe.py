"""Parameters of a workload: plain numbers, so that the measuring process need not import torch."""

from __future__ import annotations

from dataclasses import astuple, dataclass

PROMPTS_FILE = "prompts.jsonl"
DEMONSTRATIONS_FILE = "demonstrations.jsonl"
FACTS_FILE = "facts.json"


@dataclass(frozen=True)
class Workload:
    """Models, prompts, and the lengths of prompts and responses.

    Attributes:
        size: `XS` (10 thousand parameters), `S` (5.8 million), `M` (14 million), `L` (110 million) or `0.5B` (a Llama,
            for a GPU).
        hazard: Mean length of a response before the cap, tokens; each token ends it with probability 1/hazard. 0: no
            response ends early.
        max_response: The cap, tokens.
        min_prompt: Shortest prompt, tokens.
        max_prompt: Longest prompt, tokens.
        prompt_skew: Distribution of lengths between the two: min + (max − min)·u^skew for a uniform u. 0 is always the
            longest, 1 is uniform, 3 has its mean at a quarter of the range.
        vocab_size: Tokens of the vocabulary; 0 uses the default of `size`.
        context_length: Positions of the models.
        num_prompts: Number of prompts, and of demonstrations.
        seed: Seed of weights and prompts.
    """

    size: str = "S"
    hazard: float = 24.0
    max_response: int = 64
    min_prompt: int = 16
    max_prompt: int = 64
    prompt_skew: float = 1.0
    vocab_size: int = 0
    context_length: int = 512
    num_prompts: int = 256
    seed: int = 0

    @property
    def name(self) -> str:
        """A unique folder name."""
        return "_".join(f"{value:g}" if isinstance(value, float) else str(value) for value in astuple(self))
