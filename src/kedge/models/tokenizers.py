"""Tokenizers with a pad token distinct from the end-of-response token, and the tokens that end a response."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub import try_to_load_from_cache
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kedge.data.chat import end_of_turn, special_tokens
from kedge.models.adapters import is_adapter
from kedge.models.language import LanguageModel
from kedge.models.pretrained import load_config
from kedge.models.sources import base_source, check_source, loading_reason, local_folder, quiet_transformers
from kedge_base.errors import ConfigError, ModelError, is_panic
from kedge_base.texts import printable

PAD_TOKEN = "<|pad|>"
CONFIG_FILE = "tokenizer_config.json"

MOST_GROWTH = 1000.0
"""Largest factor by which a normalizer may lengthen a text. Real ones replace spaces or drop accents; a chain that
doubles every character forty times would crash or hang the process."""

MAX_SHOWN = 8
"""Maximum number of tokens that a message names: a model's list is untrusted and may be long."""

CHAT_TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "zephyr": "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
}
"""Named values of `data.chat_template`, for models without a template. `zephyr` needs no special token but EOS."""


def load_tokenizer(
    source: str | Path, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub id, left-padding, with a separate pad token.

    If pad = EOS, the end of a response is masked as padding and the model never learns to stop. A pad token is never
    sampled, so texts must not contain it either. A tokenizer whose pad token is missing, or is EOS, BOS, the unknown
    token, the end of a turn of its chat template or a single character, gets a new one; loading the model grows the
    embedding by one row for it.

    Args:
        source: Folder or hub id.
        trust_remote_code: Run Python code in the model folder.
        chat_template: Replaces the tokenizer's: a file, or a name; None keeps it.

    Raises:
        ModelError: transformers cannot load or use the source's tokenizer.
        ConfigError: There is no such chat template.
    Source: spec §2.1 (S3, N+).
    """
    name = check_source(source)
    if is_adapter(name) and not os.path.isfile(os.path.join(name, CONFIG_FILE)):
        name = base_source(name)
    try:
        if growth_of_normalizer(name) > MOST_GROWTH:
            raise ModelError("the normalizers in its tokenizer.json could make a text over 1,000 times as long")
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            drop_empty_tokens(tokenizer)
            if chat_template is not None:
                tokenizer.chat_template = _named_template(chat_template, tokenizer)
            ensure_pad_token(tokenizer)
            tokenizer.decode(tokenizer.encode("Some bad settings only show up on use."))
    except ConfigError:
        raise
    except BaseException as error:  # untrusted files: tokenizers raises plain Exception for any problem, or panics
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        folder = local_folder(name)
        if folder is not None and (folder / "config.json").is_file():
            load_config(name, trust_remote_code=trust_remote_code)  # loaded together with the tokenizer
        raise ModelError(f"tokenizer of {name!r} cannot be loaded: {loading_reason(error)}") from error
    tokenizer.padding_side = "left"
    tokenizer.source_class = _named_class(name)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template in a file, or a named one: from the tokenizer itself, or from `CHAT_TEMPLATES`."""
    own = tokenizer.chat_template
    named = {**CHAT_TEMPLATES, **(own if isinstance(own, dict) else {})}
    path = os.path.expanduser(name)
    if name in named and not os.path.isfile(path):
        return named[name]
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file in UTF-8"
        raise ConfigError(
            f"data.chat_template={name} cannot be read: {reason}; expected a file or one of {', '.join(named)}"
        ) from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer so that transformers 4 can also read it.

    transformers 5 renames the class of many tokenizers to one that earlier versions lack, and stores a list of special
    tokens under a name where they expect a mapping. So the source's class name is kept, and the list is renamed.
    """
    tokenizer.save_pretrained(folder)
    path = folder / CONFIG_FILE
    settings: dict[str, Any] = json.loads(path.read_bytes())
    named = getattr(tokenizer, "source_class", None) or settings.get("tokenizer_class")
    settings["tokenizer_class"] = "PreTrainedTokenizerFast" if named == "TokenizersBackend" else named
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _named_class(source: str) -> str | None:
    """Return the class that a tokenizer's configuration names, if any."""
    path = Path(source, CONFIG_FILE) if os.path.isdir(source) else try_to_load_from_cache(source, CONFIG_FILE)
    try:
        named = json.loads(Path(str(path)).read_bytes()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return None
    return named if isinstance(named, str) and named else None


def growth_of_normalizer(source: str) -> float:
    """Return the largest factor by which a local tokenizer's normalizer can lengthen a text; 1 without a normalizer."""
    try:
        content: Any = json.loads(Path(source, "tokenizer.json").read_bytes())
    except (OSError, ValueError):
        return 1.0  # a damaged file is reported when the tokenizer is loaded
    return _growth(content.get("normalizer") if isinstance(content, dict) else None)


def _growth(normalizer: Any) -> float:
    """The growth factor of a normalizer, or of a sequence of them."""
    if not isinstance(normalizer, dict):
        return 1.0
    if normalizer.get("type") != "Replace":
        inner = normalizer.get("normalizers")
        return math.prod(map(_growth, inner)) if isinstance(inner, list) else 1.0
    pattern = normalizer.get("pattern")
    content = len(str(normalizer.get("content", "")))
    text = str(pattern.get("String", "")) if isinstance(pattern, dict) else ""
    # A regular expression may match single characters, or the empty strings between them.
    return max(1.0, content / len(text) if text else 1.0 + content)


def drop_empty_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Remove special tokens that are empty texts, since their id would be the unknown token's."""
    for name in ("unk_token", "eos_token", "pad_token"):
        if getattr(tokenizer, name) == "":
            setattr(tokenizer, name, None)


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add a pad token unless the tokenizer already has one that has no other use and that texts do not need."""
    others = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id, end_of_turn(tokenizer))
    if tokenizer.pad_token_id in (None, *others) or len(str(tokenizer.pad_token)) == 1:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})


@dataclass(frozen=True)
class StopTokens:
    """The tokens that end a response.

    Attributes:
        ids: Their ids, at least one.
        line: The line printed at the start of a run, with these tokens and the ids declared by the model but ignored.
    """

    ids: tuple[int, ...]
    line: str


def named_stop_tokens(
    tokenizer: PreTrainedTokenizerBase, names: str | int | Sequence[str | int] | None
) -> StopTokens | None:
    """Return exactly the tokens that the user names, or None.

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
    """Collect the tokenizer's EOS, the ids at which the model's `generate` stops, and the chat template's end of turn.

    An instruction-tuned model often ends its turns with a token that is not its tokenizer's EOS: `<end_of_turn>`,
    `<|eot_id|>`, `<|im_end|>`. Sampling that ignores it would train on text that the model writes after its answer.

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
    """Return the ids at which a saved model's `generate` stops: EOS, those used in training, and those of its source.

    A declared padding token is kept: kedge never samples it, but a server that does sample it must stop there.
    """
    ends = (tokenizer.eos_token_id, *stop_ids, *_usable(tokenizer, model, _declared(model)))
    return list(dict.fromkeys(cast("int", end) for end in ends if end is not None))


def _named_id(tokenizer: PreTrainedTokenizerBase, name: str | int) -> int:
    vocabulary = tokenizer.get_vocab()
    token = name
    if isinstance(token, str):
        ids = tokenizer.encode(token, add_special_tokens=False)
        token = vocabulary.get(token, -1 if len(ids) != 1 or ids[0] == tokenizer.unk_token_id else ids[0])
    if token == tokenizer.pad_token_id or token not in vocabulary.values():  # ids may have gaps
        raise ModelError(f"rollout.stop_token {name!r} is not a single non-padding token of the vocabulary")
    return token


def _declared(model: LanguageModel) -> list[object]:
    """Read the entries of `eos_token_id` in the model's generation configuration, unchecked and in order."""
    value: object = getattr(_generation_config(model), "eos_token_id", None)
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _usable(tokenizer: PreTrainedTokenizerBase, model: LanguageModel, declared: Iterable[object]) -> list[int]:
    """Select the declared ids that are tokens.

    If a model has no generation configuration, transformers derives one from config.json, where the id may be the
    architecture's default and an ordinary word in this vocabulary. So only special tokens count there.
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
    """Format a token's text, quoted if blank or unprintable; an entry that is not a token is unchanged."""
    if type(entry) is not int or entry not in tokenizer.get_vocab().values():
        return printable(str(entry))[:40]
    text = str(tokenizer.decode([entry]))
    return (text if text.strip() == text != "" and text.isprintable() else repr(text))[:40]
