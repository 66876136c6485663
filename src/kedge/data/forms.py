"""Converts other projects' forms of rows to kedge's: ShareGPT, Alpaca, labeled pairs, token ids.

A comparison can be read as a prompt and as a demonstration, and has the same prompt in every role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from kedge.data.fields import (
    Fields,
    Messages,
    Role,
    decoded,
    entries_of,
    field_of,
    is_conversation,
    messages_of,
    number_of,
    text_of,
)
from kedge.data.records import RowError
from kedge.data.tokens import encode_example, encode_prompt, is_character_tokenizer, num_shared
from kedge_base.machine.invocation import as_argument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONVERSATIONS = ("conversations", "conversation")
_MAY_BE_CONVERSATIONS = (*_CONVERSATIONS, "messages", "prompt", "completion", "chosen", "rejected")

_PAIRS = (
    ("output_1", "output_2", "label", 1, 2),
    ("output_1", "output_2", "preference", 1, 2),
    ("response_0", "response_1", "better_response_id", 0, 1),
    ("conversation_a", "conversation_b", "winner", "model_a", "model_b"),
    ("response_a", "response_b", "winner", "model_a", "model_b"),
)
"""Columns of two answers, the column that labels the better one, and its values for the first and the second answer:
LLMBar, AlpacaFarm, PKU-SafeRLHF, Chatbot Arena.
"""

_SCORES = ("fine-grained_score", "overall_score")
"""UltraFeedback's scores of a completion: the mean rating, and the critique's score, which has known errors."""

_ANSWER_MARK = "\n\nAssistant:"
"""Precedes each answer in hh-rlhf's dialogues, which are plain text."""

# Stanford Alpaca's prompts, for models without a chat template.
_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."
_ALONE = f"{_TASK}. {_REQUEST}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n"
_WITH_INPUT = (
    f"{_TASK}, paired with an input that provides further context. {_REQUEST}\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def standard_form(fields: Fields, role: Role, tokenizer: PreTrainedTokenizerBase) -> Fields:
    """Convert a row to one of kedge's own forms; unchanged if it is already in one, or in no known form.

    - `conversations` (ShareGPT), with an optional `system`, become `messages`; next to `chosen`, the prompt;
    - two answers with a label become `chosen` and `rejected`; scored `responses` or `completions` (UltraFeedback),
      `responses` and `ranks`;
    - a comparison with its prompt in another column, or at the start of both answers, gets `prompt`, and, as a
      demonstration, the better answer as its `completion`;
    - `instruction`, `input` and `output` (Alpaca) become `prompt` and `completion`: a conversation if the tokenizer has
      a chat template, else the text that Alpaca trains with;
    - `question` and `answer` (GSM8K) likewise, without Alpaca's text;
    - `input_ids` become the texts that they encode.

    The original columns are kept, since reward functions may read them.

    Raises:
        RowError: The row has such a form but cannot be used.
    """
    fields = {name: _conversation(value) if name in _MAY_BE_CONVERSATIONS else value for name, value in fields.items()}
    conversation = next((name for name in _CONVERSATIONS if is_conversation(fields.get(name))), None)
    if conversation is not None and not fields.keys() & {"messages", "prompt", "completion"}:
        messages = [*_system(fields), *messages_of(fields[conversation], conversation)]
        rest = {name: value for name, value in fields.items() if name not in (conversation, "text")}
        fields = {**rest, "messages": messages}
    is_demonstration = role == "demonstrations" and _demonstrates(fields)
    if role == "comparisons" or (is_comparison(fields) and not is_demonstration):
        # A prompt does not depend on which answer is better.
        with suppress(RowError) if role == "prompts" else nullcontext():
            fields = _compared(fields)
        fields = _with_prompt(fields, tokenizer, role)
        return {**fields, "completion": _better(fields)} if role == "demonstrations" else fields
    answered = role == "prompts" or "output" in fields
    if "instruction" in fields and answered and not fields.keys() & {"prompt", "messages"}:
        answer = {"completion": fields["output"]} if "output" in fields and "completion" not in fields else {}
        rest = {name: value for name, value in fields.items() if name not in ("text", "output")}
        return {**rest, "prompt": _instruction(fields, tokenizer), **answer}
    if role in ("prompts", "demonstrations") and _is_question(fields):
        answer = {"completion": fields["answer"]} if role == "demonstrations" and "answer" in fields else {}
        return {**fields, "prompt": _asked(fields, fields["question"], tokenizer), **answer}
    if "input_ids" in fields and not fields.keys() & {"prompt", "messages", "text"}:
        return texts_of_ids(fields, role, tokenizer)
    return fields


def _is_question(fields: Fields) -> bool:
    """True if a row's `question` is the whole prompt, without another prompt, choices or context."""
    others = {"prompt", "messages", "text", "completion", "choices", "options", "context"}
    return isinstance(fields.get("question"), str) and not fields.keys() & others


def is_comparison(fields: Fields) -> bool:
    """True if a row has a better and a worse answer: `chosen` and `rejected`, a ranking, or a labeled pair."""
    forms = (
        {"chosen", "rejected"},
        {"responses", "ranks"},
        {"responses", "scores"},
        *({first, second, label} for first, second, label, *_ in _PAIRS),
    )
    return any(fields.keys() >= form for form in forms) or _scores_of(fields) is not None


def _conversation(value: Any) -> Any:
    """Parse a conversation written as JSON, as in a CSV cell; return any other value unchanged."""
    found = decoded(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    return found if is_conversation(found) else value


def _compared(fields: Fields) -> Fields:
    """Convert other forms of comparisons to `chosen` and `rejected`, or `responses` and `ranks`."""
    if fields.keys() & {"scores", "responses", "ranks", "chosen"} == {"scores", "responses"}:
        return {**fields, "ranks": [-number_of(each, "scores") for each in entries_of(fields["scores"], "scores")]}
    if fields.keys() & {"chosen", "rejected", "responses"}:
        return fields
    for first, second, label, *values in _PAIRS:
        if fields.keys() >= {first, second, label}:
            value: Any = decoded(fields[label])
            if value not in values or isinstance(value, bool):
                hint = "; add 1 to labels that count from 0" if value == 0 else ""
                expected = f"{values[0]} ({first!r} is better) or {values[1]} ({second!r}){hint}"
                raise RowError(f"field {label!r} is {value!r:.40}, expected {expected}")
            better, worse = (first, second) if value == values[0] else (second, first)
            return {**fields, "chosen": fields[better], "rejected": fields[worse]}
    if name := _scores_of(fields):
        entries: list[Any] = fields["completions"]
        ranks = [-number_of(field_of(entry, name), f"completions.{name}") for entry in entries]
        return {**fields, "responses": [entry["response"] for entry in entries], "ranks": ranks}
    return fields


def _scores_of(fields: Fields) -> str | None:
    """Return the name of a score that all `completions` have, or None."""
    entries = fields.get("completions")
    if not isinstance(entries, (list, tuple)) or len(entries) < 2:
        return None
    scored = all(isinstance(entry, Mapping) and "response" in entry for entry in entries)
    return next((name for name in _SCORES if scored and all(name in entry for entry in entries)), None)


def _demonstrates(fields: Fields) -> bool:
    """True if a comparison's other columns make it a demonstration."""
    messages = fields.get("messages")
    ended = is_conversation(messages) and messages_of(messages, "messages")[-1]["role"] == "assistant"
    return ended or bool(fields.keys() & {"completion", "text", "output"})


def ranked_answers(fields: Fields) -> tuple[Sequence[Any], list[float]]:
    """Return a ranking's answers and their ranks.

    Raises:
        RowError: There is not one rank per answer.
    """
    responses = entries_of(fields["responses"], "responses")
    entries = entries_of(field_of(fields, "ranks"), "ranks")
    ranks = [number_of(entry, f"ranks[{index}]") for index, entry in enumerate(entries)]
    if len(responses) != len(ranks):
        raise RowError(f"{len(responses)} responses have {len(ranks)} ranks, expected one rank per response")
    return responses, ranks


def _better(fields: Fields) -> Any:
    """Return the best answer of a comparison."""
    if "chosen" in fields:
        return fields["chosen"]
    responses, ranks = ranked_answers(fields)
    return responses[ranks.index(min(ranks))]


def _with_prompt(fields: Fields, tokenizer: PreTrainedTokenizerBase, role: Role) -> Fields:
    """Give a comparison its prompt, from a column of another name or from the start of both answers."""
    if "prompt" in fields:
        is_needed = role != "prompts" or tokenizer.chat_template
        is_repeated = is_needed and "rejected" in fields and _repeats(fields.get("chosen"), fields["prompt"])
        return _split(fields) if is_repeated else fields
    if "messages" in fields:
        return {**fields, "prompt": fields["messages"]}
    if "instruction" in fields:
        return {**fields, "prompt": _instruction(fields, tokenizer)}
    for name in ("question", "input"):
        if isinstance(fields.get(name), str):
            # Otherwise the common start of both answers would count as the prompt.
            return {**fields, "prompt": _asked(fields, fields[name], tokenizer)}
    if fields.keys() & {"chosen_input_ids", "input_ids_chosen", "chosen_ids"} and "chosen" not in fields:
        raise RowError("comparisons cannot be given as token ids; give the texts 'prompt', 'chosen' and 'rejected'")
    tied = {"chosen": fields.get("conversation_a"), "rejected": fields.get("conversation_b")}
    if "chosen" not in fields and None not in tied.values():  # read as a prompt, although no answer is better
        return {**fields, "prompt": _split(tied)["prompt"]}
    return _split(fields) if fields.keys() >= {"chosen", "rejected"} else fields


def _repeats(answer: object, prompt: object) -> bool:
    """True if the answer is a full conversation that begins with the prompt; a text usually is its first question."""
    if not isinstance(answer, (list, tuple)):
        return False
    messages = messages_of(answer, "chosen")
    if isinstance(prompt, str):
        return messages[0]["role"] != "assistant"
    asked = messages_of(prompt, "prompt")
    return messages[: len(asked)] == asked


def _split(fields: Fields) -> Fields:
    """Split a comparison without a prompt: the common start of both answers is the prompt, the rest are the answers."""
    chosen = fields["chosen"]
    rejected = fields["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        count = _shared_characters(chosen, rejected)
        prompt: str | Messages = chosen[:count]
        first = chosen
        second = rejected
    else:
        first = messages_of(chosen, "chosen")
        second = messages_of(rejected, "rejected")
        count = min(num_shared(first, second), len(first) - 1, len(second) - 1)
        prompt = first[:count]
    if not prompt:
        raise RowError("field 'prompt' is missing, and 'chosen' and 'rejected' have no common start")
    return {**fields, "prompt": prompt, "chosen": first[count:], "rejected": second[count:]}


def _shared_characters(first: str, second: str) -> int:
    """Return the length of the common start of two texts, cut at its last whitespace so that answers start at a word.

    In an hh-rlhf dialogue, it ends where the last answer starts, even if both answers start with the same words.
    """
    count = num_shared(first, second)
    if (mark := first.rfind(_ANSWER_MARK, 0, count)) >= 0:
        return mark + len(_ANSWER_MARK)
    if count in (len(first), len(second)):
        return count
    return max((index for index in range(count) if first[index].isspace()), default=0)


def _instruction(fields: Fields, tokenizer: PreTrainedTokenizerBase) -> Any:
    instruction = text_of(field_of(fields, "instruction"), "instruction")
    context = fields.get("context")  # a text in Dolly's rows; elsewhere a list or an object, for retrieval
    given = fields.get("input", context if isinstance(context, str) else "")
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    given = str(given) if is_number else text_of(given, "input").strip() if given else ""
    asked = _asked(fields, f"{instruction}\n{given}" if given else instruction, tokenizer)
    if tokenizer.chat_template:
        return asked
    return (_WITH_INPUT if given else _ALONE).format(instruction=instruction, input=given)


def _asked(fields: Fields, question: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Combine a question with its system message and earlier turns; without a chat template, return it as text."""
    if not tokenizer.chat_template:
        if fields.get("history") or _system(fields):
            raise RowError("the row is a conversation ('history' or 'system'), but the tokenizer has no chat template")
        return question
    turns = [
        {"role": role, "content": text}
        for pair in entries_of(fields.get("history") or [], "history")
        for role, text in zip(("user", "assistant"), entries_of(pair, "history"), strict=False)
    ]
    return [*_system(fields), *turns, {"role": "user", "content": question}]


def _system(fields: Mapping[str, Any]) -> list[dict[str, str]]:
    system = fields.get("system")
    return [{"role": "system", "content": text_of(system, "system")}] if system else []


_UNTRAINED = -100
MASKS = ("completion_mask", "assistant_masks", "loss_mask")


def texts_of_ids(fields: Fields, role: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Replace a row's `input_ids` by texts: `prompt`, `prompt` and `completion`, or `text`.

    Padding is dropped where `attention_mask` is 0. `labels` (−100 on the prompt) or `completion_mask` (1 on the
    completion) split prompt and completion; in the role of prompts, only the part before remains. A missing prefix
    (BOS) or EOS is added, as for texts.

    Raises:
        RowError: The ids are not the tokenizer's, or their texts would be encoded to other ids.
    """
    if is_character_tokenizer(tokenizer):
        raise RowError(f"token ids need a model: {as_argument('--model')}")
    ids = [_token(entry, len(tokenizer)) for entry in entries_of(fields["input_ids"], "input_ids")]
    read = _flags(fields, "attention_mask", len(ids))
    mask = next((name for name in ("labels", *MASKS) if name in fields), None)
    flags = _flags(fields, mask, len(ids)) if mask else [False] * len(ids)
    tokens = [token for token, used in zip(ids, read, strict=True) if used]
    trained = [flag for flag, used in zip(flags, read, strict=True) if used]
    prefix = encode_prompt(tokenizer, "")
    if tokens[: len(prefix)] == prefix:
        # Encoding adds the prefix again. Kept in the text, it would make SentencePiece insert a space after it.
        del tokens[: len(prefix)], trained[: len(prefix)]
    start = trained.index(True) if True in trained else None
    rest = {name: value for name, value in fields.items() if name not in ("input_ids", "attention_mask")}
    if role == "prompts":
        text = _decoded(tokenizer, tokens[:start])
        _check(encode_prompt(tokenizer, text), tokens[:start], tokenizer)
        return {**rest, "prompt": text}
    if mask and not all(trained[start:]):
        raise RowError("'labels' or the mask train on tokens that other tokens follow; only the end can be trained on")
    if tokens[-1:] == [tokenizer.eos_token_id]:
        del tokens[-1]
    prompt = _decoded(tokenizer, tokens[: start or 0])
    completion = _decoded(tokenizer, tokens)[len(prompt) :]
    example = encode_example(tokenizer, prompt, completion)
    _check([*example.prompt, *example.completion[:-1]], tokens, tokenizer)
    return {**rest, "prompt": prompt, "completion": completion} if prompt else {**rest, "text": completion}


def _token(entry: object, num_tokens: int) -> int:
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise RowError("field 'input_ids' must hold whole numbers")
    if not 0 <= entry < num_tokens:
        raise RowError(
            f"token id {entry} is not in the vocabulary, which has {num_tokens} tokens",
            "token id not in the vocabulary",
        )
    return entry


def _flags(fields: Fields, name: str, length: int) -> list[bool]:
    """Return True for tokens that a mask or `labels` count; True everywhere without the field."""
    entries = entries_of(fields.get(name, [True] * length), name)
    if len(entries) != length:
        raise RowError(f"field {name!r} has {len(entries)} entries, 'input_ids' has {length}")
    return [entry != _UNTRAINED if name == "labels" else bool(entry) for entry in entries]


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _check(encoded: list[int], ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    if encoded not in (ids, [*encode_prompt(tokenizer, ""), *ids]):
        raise RowError(
            "the tokenizer would encode the text of 'input_ids' to other ids; give the text, or ids of this tokenizer"
        )
