"""One prompt and its answers, wherever a row has them, as texts that fit.

They stand in the row as texts, as conversations, as a TL;DR post, or with the prompt inside the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kedge.data.chat import render_answer, render_prompt, shared_messages
from kedge.data.fields import Fields, Messages, field_of, messages_of, text_of
from kedge.data.rejections import RowError
from kedge.data.templates import render_tldr, tldr_response
from kedge.data.tokens import encode_completion, encode_prompt
from kedge.data.truncation import Truncate, refuse_giant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Rules", "Template", "answered", "check_lengths", "exchange", "tldr_prompt"]

Template: TypeAlias = Literal["none", "tldr"]
_TLDR_FIELDS = ("subreddit", "title", "post")


@dataclass(frozen=True)
class Rules:
    """How rows are understood.

    Attributes:
        tokenizer: renders conversations and measures lengths.
        template: `tldr` builds prompts from the fields `subreddit`, `title` and `post`.
        max_prompt_tokens: the longest prompt, tokens, BOS included; None for no limit.
        max_length: the longest prompt with one answer, tokens, BOS and EOS included; None for no limit.
        truncate: what becomes of a plain-text prompt over `max_prompt_tokens`.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Template = "none"
    max_prompt_tokens: int | None = None
    max_length: int | None = None
    truncate: Truncate = "never"


def answered(fields: Fields, answers: Mapping[str, Any], rules: Rules) -> tuple[str, ...]:
    """The prompt, wherever the row has it, followed by the answers.

    Args:
        fields: the row.
        answers: the answers' fields by name, unchecked.
        rules: how rows are understood.

    Raises:
        RowError: A part is missing, empty, of the wrong type or too long.
        DataError: A conversation meets a tokenizer without a chat template.
    """
    if rules.template == "tldr":
        texts = {name: tldr_response(text_of(answer, name)) for name, answer in answers.items()}
        _refuse_giants(texts, rules)
        longest = max(len(encode_completion(rules.tokenizer, text)) for text in texts.values())
        limits = (rules.max_prompt_tokens, None if rules.max_length is None else rules.max_length - longest)
        budget = min((limit for limit in limits if limit is not None), default=None)
        prompt = tldr_prompt(fields, rules, budget=budget)
        return check_lengths(prompt, texts, rules)
    if "chosen" in answers and _holds_prompt_in_answers(fields):
        return exchange(*_split_prompt(answers["chosen"], answers["rejected"]), rules)
    return exchange(field_of(fields, "prompt"), answers, rules)


def exchange(prompt: object, answers: Mapping[str, Any], rules: Rules) -> tuple[str, ...]:
    """The texts of a prompt and its answers, where any of them may be a conversation."""
    if not any(isinstance(part, (list, tuple)) for part in (prompt, *answers.values())):
        texts = {name: text_of(answer, name) for name, answer in answers.items()}
        return check_lengths(text_of(prompt, "prompt"), texts, rules)
    messages = _spoken(prompt, "prompt", "user")
    start = render_prompt(rules.tokenizer, messages)
    texts = {
        name: text_of(render_answer(rules.tokenizer, messages, _spoken(answer, name, "assistant")), name)
        for name, answer in answers.items()
    }
    return check_lengths(start, texts, rules)


def _spoken(value: object, name: str, role: str) -> Messages:
    """A conversation, or one text beside conversations: a message of the role that its place implies."""
    return [{"role": role, "content": text_of(value, name)}] if isinstance(value, str) else messages_of(value, name)


def _holds_prompt_in_answers(fields: Fields) -> bool:
    if "prompt" not in fields:
        return True
    # Some published sets repeat the prompt as text beside whole conversations.
    chosen = fields["chosen"]
    return isinstance(fields["prompt"], str) and isinstance(chosen, list) and _starts_with_question(chosen)


def _starts_with_question(conversation: list[Any]) -> bool:
    return messages_of(conversation, "chosen")[0]["role"] != "assistant"


def _split_prompt(chosen: object, rejected: object) -> tuple[str | Messages, dict[str, Any]]:
    """The beginning that two whole texts or conversations share, and what each adds to it."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        count = _shared_characters(chosen, rejected)
        prompt: str | Messages = chosen[:count]
        first, second = chosen, rejected
    else:
        first, second = messages_of(chosen, "chosen"), messages_of(rejected, "rejected")
        count = min(shared_messages(first, second), len(first) - 1, len(second) - 1)
        prompt = first[:count]
    if not prompt:
        raise RowError("field 'prompt' is missing, and 'chosen' and 'rejected' do not begin alike")
    return prompt, {"chosen": first[count:], "rejected": second[count:]}


def _shared_characters(first: str, second: str) -> int:
    """Length of the common start of two texts, up to the last space or line break in it: answers begin with a word."""
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    if count in (len(first), len(second)):
        return count
    return max((index for index in range(count) if first[index].isspace()), default=0)


def tldr_prompt(fields: Fields, rules: Rules, *, budget: int | None) -> str:
    """The TL;DR prompt of a row, at most `budget` tokens long."""
    subreddit, title, post = (text_of(field_of(fields, name), name) for name in _TLDR_FIELDS)
    return render_tldr(subreddit, title, post, rules.tokenizer, budget)


def check_lengths(prompt: str, answers: Mapping[str, str], rules: Rules) -> tuple[str, ...]:
    """The texts, once they are known to fit."""
    limits = [limit for limit in (rules.max_prompt_tokens, rules.max_length) if limit is not None]
    if limits:
        refuse_giant(rules.tokenizer, prompt, min(limits), "the prompt")
    _refuse_giants(answers, rules)
    length = len(encode_prompt(rules.tokenizer, prompt))
    if length == 0:
        raise RowError("the prompt has no tokens")
    if rules.max_prompt_tokens is not None and length > rules.max_prompt_tokens:
        raise RowError(f"the prompt is {length} tokens long, at most {rules.max_prompt_tokens} fit")
    if rules.max_length is not None:
        for name, answer in answers.items():
            total = length + len(encode_completion(rules.tokenizer, answer))
            if total > rules.max_length:
                raise RowError(f"prompt and {name!r} are {total} tokens long, at most {rules.max_length} fit")
    return (prompt, *answers.values())


def _refuse_giants(answers: Mapping[str, str], rules: Rules) -> None:
    if rules.max_length is not None:
        for name, answer in answers.items():
            refuse_giant(rules.tokenizer, answer, rules.max_length, repr(name))
