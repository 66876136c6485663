"""The opponent of a policy: the references in the data, or a policy with its own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kedge.data import Prompt, encode_prompt, room_for_prompt, tldr_response
from kedge.data.chat import render_prompt
from kedge.data.fields import messages_of
from kedge.data.records import RowError
from kedge.errors import DataError
from kedge.rewards import MESSAGES_COLUMN
from kedge.stages.evaluation.policy import Policy

__all__ = ["read_references", "render_for"]

REFERENCE_COLUMNS = ("completion", "chosen", "summary")


def read_references(prompts: Sequence[Prompt], *, template: str) -> list[str]:
    """The reference of each prompt: its `completion`, `chosen` or `summary`; of a conversation, the last message.

    Args:
        prompts: The prompts with their columns.
        template: `tldr` prepends the space that summaries have in training.

    Raises:
        DataError: A prompt has no reference.
    """
    texts = [_reference(prompt.columns) for prompt in prompts]
    if missing := [number for number, text in enumerate(texts, start=1) if not text]:
        raise DataError(
            f"{len(missing)} of {len(texts)} prompts have no reference, first prompt {missing[0]}; add a column "
            f"{' or '.join(REFERENCE_COLUMNS)}, or name a policy to compare with: --against"
        )
    return [tldr_response(text) if template == "tldr" else text for text in texts]


def _reference(columns: Mapping[str, Any]) -> str:
    for name in REFERENCE_COLUMNS:
        value = columns.get(name)
        if isinstance(value, (list, Mapping)):
            try:
                value = messages_of(value, name)[-1]["content"]
            except RowError:
                continue
        if isinstance(value, str) and value.strip():
            return value
    return ""


def render_for(policy: Policy, prompts: Sequence[Prompt], reader: Policy, *, max_new_tokens: int) -> list[Prompt]:
    """The prompts rendered with a policy's chat template; unchanged if it has no template.

    Args:
        policy: The policy to sample from.
        prompts: Prompts rendered with `reader`'s template.
        reader: The policy whose template rendered them.
        max_new_tokens: Tokens of the context to reserve for the response.

    Raises:
        DataError: The template rejects a conversation, or a prompt is too long for the policy's context.
    """
    rendered = list(prompts)
    if policy.tokenizer.chat_template not in (None, reader.tokenizer.chat_template):
        rendered = [_rendered(policy, prompt, number) for number, prompt in enumerate(prompts, start=1)]
    room = room_for_prompt([policy.model.sampling_length], max_new_tokens)
    for number, prompt in enumerate(rendered if room is not None else [], start=1):
        length = len(encode_prompt(policy.tokenizer, prompt.text))
        if room is not None and length > room:
            raise DataError(
                f"prompt {number} is {length} tokens long for {policy.source!r}, which can continue at most {room}; "
                "lower data.max_prompt_tokens"
            )
    return rendered


def _rendered(policy: Policy, prompt: Prompt, number: int) -> Prompt:
    messages = prompt.columns.get(MESSAGES_COLUMN)
    if not messages:
        return prompt
    try:
        return replace(prompt, text=render_prompt(policy.tokenizer, messages))
    except RowError as error:
        raise DataError(f"prompt {number}, for {policy.source!r}: {error}") from error
