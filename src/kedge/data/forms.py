"""Forms of rows that other projects write, turned into kedge's: ShareGPT, Alpaca, token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kedge.data.columns import Role
from kedge.data.fields import Fields, entries_of, field_of, messages_of, text_of
from kedge.data.rejections import RowError
from kedge.data.token_ids import texts_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["standard_form"]

_CONVERSATIONS = ("conversations", "conversation")

# The prompts of Stanford Alpaca, which models without a chat template are trained with.
_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."
_ALONE = f"{_TASK}. {_REQUEST}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n"
_WITH_INPUT = (
    f"{_TASK}, paired with an input that provides further context. {_REQUEST}\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def standard_form(fields: Fields, role: Role, tokenizer: PreTrainedTokenizerBase) -> Fields:
    """The row in one of kedge's own forms; unchanged if it is in one already, or in none that is known.

    - `conversations` (ShareGPT), with an optional `system`, become `messages`; next to `chosen`, the prompt;
    - `instruction`, `input` and `output` (Alpaca) become `prompt` and `completion`: a conversation if the tokenizer has
      a chat template, else the text that Alpaca trains with;
    - `input_ids` become the texts that they encode.

    The original columns stay, since reward functions may read them.

    Raises:
        RowError: The row has such a form but cannot be used.
    """
    conversation = next((name for name in _CONVERSATIONS if isinstance(fields.get(name), (list, tuple))), None)
    if conversation is not None and not fields.keys() & {"messages", "prompt", "completion"}:
        messages = [*_system(fields), *messages_of(fields[conversation], conversation)]
        rest = {name: value for name, value in fields.items() if name not in (conversation, "text")}
        fields = {**rest, "messages": messages}
    if role == "comparisons":
        return _with_prompt(fields, tokenizer)
    answered = role == "prompts" or "output" in fields
    if "instruction" in fields and answered and not fields.keys() & {"prompt", "messages"}:
        output = fields.get("output")
        answer = {} if output is None or "completion" in fields else {"completion": output}
        rest = {name: value for name, value in fields.items() if name not in ("text", "output")}
        return {**rest, "prompt": _instruction(fields, tokenizer), **answer}
    if "input_ids" in fields and not fields.keys() & {"prompt", "messages", "text"}:
        return texts_of_ids(fields, role, tokenizer)
    return fields


def _with_prompt(fields: Fields, tokenizer: PreTrainedTokenizerBase) -> Fields:
    """A comparison with its prompt, if it stands in a column of another name."""
    if "prompt" in fields:
        return fields
    if "messages" in fields:
        return {**fields, "prompt": fields["messages"]}
    if "instruction" in fields:
        return {**fields, "prompt": _instruction(fields, tokenizer)}
    if isinstance(fields.get("question"), str):
        # Without it, the common start of both answers would count as the prompt.
        return {**fields, "prompt": _asked(fields, fields["question"], tokenizer)}
    if fields.keys() & {"chosen_input_ids", "input_ids_chosen", "chosen_ids"} and "chosen" not in fields:
        raise RowError("comparisons cannot be given as token ids; give the texts 'prompt', 'chosen' and 'rejected'")
    return fields


def _instruction(fields: Fields, tokenizer: PreTrainedTokenizerBase) -> Any:
    instruction, given = text_of(field_of(fields, "instruction"), "instruction"), fields.get("input")
    given = given.strip() if isinstance(given, str) else ""
    if tokenizer.chat_template:
        return _asked(fields, f"{instruction}\n{given}" if given else instruction, tokenizer)
    if fields.get("history") or _system(fields):
        raise RowError("the row is a conversation ('history' or 'system'), but the tokenizer has no chat template")
    return (_WITH_INPUT if given else _ALONE).format(instruction=instruction, input=given)


def _asked(fields: Fields, question: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A question with its system message and earlier turns; a plain text if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        return question
    turns = [
        {"role": role, "content": text}
        for pair in entries_of(fields.get("history") or [], "history")
        for role, text in zip(("user", "assistant"), entries_of(pair, "history"), strict=False)
    ]
    return [*_system(fields), *turns, {"role": "user", "content": question}]


def _system(fields: Mapping[str, Any]) -> list[dict[str, str]]:
    system = fields.get("system")
    return [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
