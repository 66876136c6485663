"""Responses for judges and files: joined from batches, built from texts, written as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from kedge.data import Prompt, encode_completion, encode_prompt
from kedge.rewards import Responses, Scores
from kedge.rewards.source import free_names

__all__ = ["join_responses", "response_rows", "written_responses"]


def join_responses(parts: Sequence[Responses]) -> Responses:
    """Join batches of responses that all have the same columns."""
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
    """Texts as responses in a tokenizer's tokens: references, or responses of a policy with another tokenizer."""
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


def response_rows(responses: Responses, scores: Scores | None) -> Iterator[dict[str, Any]]:
    """Each response as a row with the columns of its prompt.

    A column whose name is taken, such as a reference `completion`, becomes `given_<name>`.
    """
    own = ("prompt", "completion", "stopped", *(() if scores is None else ("score",)))
    names = free_names(responses.columns, own)
    for index, (prompt, completion) in enumerate(zip(responses.prompts, responses.completions, strict=True)):
        row: dict[str, Any] = {"prompt": prompt, "completion": completion, "stopped": responses.stopped[index]}
        if scores is not None:
            row["score"] = scores[index]
        yield {**row, **{names[column]: entries[index] for column, entries in responses.columns.items()}}
