"""Responses as judges are given them, put together from batches or from plain texts."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from kedge.data import Prompt, encode_completion, encode_prompt
from kedge.rewards import Responses

__all__ = ["join_responses", "written_responses"]


def join_responses(parts: Sequence[Responses]) -> Responses:
    """Batches of responses as one; all have the same columns."""
    return Responses(
        prompts=[text for part in parts for text in part.prompts],
        completions=[text for part in parts for text in part.completions],
        prompt_ids=[ids for part in parts for ids in part.prompt_ids],
        response_ids=[ids for part in parts for ids in part.response_ids],
        stopped=[stopped for part in parts for stopped in part.stopped],
        columns={name: [entry for part in parts for entry in part.columns[name]] for name in parts[0].columns},
        max_new_tokens=parts[0].max_new_tokens,
        seed=parts[0].seed,
    )


def written_responses(
    prompts: Sequence[Prompt], completions: list[str], stopped: list[bool], tokenizer: PreTrainedTokenizerBase
) -> Responses:
    """Texts that no policy of these tokens sampled, described as if one had: references, another family's responses."""
    return Responses(
        prompts=[prompt.text for prompt in prompts],
        completions=completions,
        prompt_ids=[encode_prompt(tokenizer, prompt.text) for prompt in prompts],
        response_ids=[
            encode_completion(tokenizer, text, eos=ended) for text, ended in zip(completions, stopped, strict=True)
        ],
        stopped=stopped,
        columns={name: [prompt.columns[name] for prompt in prompts] for name in prompts[0].columns},
    )
