"""The tokens that end a response: those that the user names, or those that tokenizer, model and template declare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerBase

from kedge.data.chat import end_of_turn, special_tokens
from kedge.errors import ModelError
from kedge.models.language import LanguageModel
from kedge.system.texts import printable

__all__ = ["StopTokens", "kept_stop_ids", "named_stop_tokens", "own_stop_tokens"]

MAX_SHOWN = 8
"""Tokens named in one line: a model's list is untrusted and may be long."""


@dataclass(frozen=True)
class StopTokens:
    """The tokens that end a response.

    Attributes:
        ids: Their ids, at least one.
        line: Says at the start of a run which they are, and which ids that the model declares are ignored.
    """

    ids: tuple[int, ...]
    line: str


def named_stop_tokens(
    tokenizer: PreTrainedTokenizerBase, names: str | int | Sequence[str | int] | None
) -> StopTokens | None:
    """The tokens that the user names, and no others; None if the user names none.

    Args:
        tokenizer: The policy's.
        names: Tokens as ids, as entries of the vocabulary, or as texts that encode to one token, such as a newline.

    Raises:
        ModelError: One of them is not a single token of the vocabulary, or is the padding token.
    """
    if names is None:
        return None
    given = [names] if isinstance(names, (str, int)) else names
    ids = tuple(dict.fromkeys(_named_id(tokenizer, name) for name in given))
    return StopTokens(ids, f"responses end with {_listed(tokenizer, ids, ' or ')}")


def own_stop_tokens(tokenizer: PreTrainedTokenizerBase, model: LanguageModel) -> StopTokens:
    """The tokenizer's EOS, the ids at which the model's own `generate` stops, and the end of the template's turns.

    An instruction-tuned model often ends its turns with a token that is not its tokenizer's EOS: `<end_of_turn>`,
    `<|eot_id|>`, `<|im_end|>`. Sampling that ignores it would train on what the model writes after its answer.

    Args:
        tokenizer: The policy's.
        model: The policy.

    Raises:
        ModelError: There is no such token.
    """
    declared = _declared(model)
    ends = (tokenizer.eos_token_id, *_usable(tokenizer, model, declared), end_of_turn(tokenizer))
    ids = tuple(dict.fromkeys(cast("int", end) for end in ends if end not in (None, tokenizer.pad_token_id)))
    if not ids:
        raise ModelError(
            "the tokenizer has no EOS token and the model declares none; set rollout.stop_token to the token that "
            "ends a response"
        )
    ignored = [entry for entry in declared if entry not in ids]
    reason = f"; ignored, because never sampled or not special: {_listed(tokenizer, ignored, ', ')}" if ignored else ""
    return StopTokens(ids, f"responses end with {_listed(tokenizer, ids, ' or ')}{reason}")


def kept_stop_ids(tokenizer: PreTrainedTokenizerBase, model: LanguageModel, stop_ids: Iterable[int]) -> list[int]:
    """The ids at which a saved model's `generate` stops: EOS, those of its training, and those that it came with.

    A declared padding token is kept: kedge never samples it, but a server that does must stop there.
    """
    ends = (tokenizer.eos_token_id, *stop_ids, *_usable(tokenizer, model, _declared(model)))
    return list(dict.fromkeys(cast("int", end) for end in ends if end is not None))


def _named_id(tokenizer: PreTrainedTokenizerBase, name: str | int) -> int:
    if isinstance(name, int):
        token = name if 0 <= name < len(tokenizer) else None
    else:
        ids = tokenizer.encode(name, add_special_tokens=False)
        token = tokenizer.get_vocab().get(name, ids[0] if len(ids) == 1 else None)
    if token is None or token == tokenizer.pad_token_id:
        raise ModelError(f"rollout.stop_token {name!r} is not a single non-padding token of the vocabulary")
    return token


def _declared(model: LanguageModel) -> list[object]:
    """`eos_token_id` of the model's generation configuration: untrusted entries, in order."""
    value: object = getattr(_generation_config(model), "eos_token_id", None)
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _usable(tokenizer: PreTrainedTokenizerBase, model: LanguageModel, declared: Iterable[object]) -> list[int]:
    """The declared ids that are tokens.

    Without a generation configuration of its own, a model has the one that transformers derives from config.json, where
    the id may be the default of the architecture and, in another vocabulary, an ordinary word. So only special tokens
    count there.
    """
    derived = getattr(_generation_config(model), "_from_model_config", False)
    known = set(special_tokens(tokenizer).values() if derived else tokenizer.get_vocab().values())
    return [cast("int", entry) for entry in declared if type(entry) is int and entry in known]


def _generation_config(model: LanguageModel) -> object:
    return getattr(model.causal, "generation_config", None)  # remote code may lack it


def _listed(tokenizer: PreTrainedTokenizerBase, entries: Sequence[object], separator: str) -> str:
    more = f"{separator}{len(entries) - MAX_SHOWN} more" if len(entries) > MAX_SHOWN else ""
    return separator.join(_shown(tokenizer, entry) for entry in entries[:MAX_SHOWN]) + more


def _shown(tokenizer: PreTrainedTokenizerBase, entry: object) -> str:
    """A token's text, in quotes if it is blank or has line breaks; an entry that is no token as it is."""
    if type(entry) is not int or not 0 <= entry < len(tokenizer):
        return printable(str(entry))[:40]
    text = str(tokenizer.decode([entry]))
    return (text if text.strip() == text != "" and text.isprintable() else repr(text))[:40]
