"""Tokenizers with a pad token distinct from the end-of-response token."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kedge.data.chat import end_of_turn
from kedge.errors import ConfigError, ModelError, is_panic
from kedge.models.adapters import is_adapter
from kedge.models.pretrained import base_source, check_source, loading_reason, quiet_transformers

__all__ = ["load_tokenizer", "save_tokenizer"]

PAD_TOKEN = "<|pad|>"
CONFIG_FILE = "tokenizer_config.json"

MOST_GROWTH = 1000.0
"""Times that a normalizer may make a text longer. Real ones replace a space by a sign, or drop accents; a chain that
doubles every character forty times ends the process, or seems to."""


CHAT_TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "zephyr": "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
}
"""The names of `data.chat_template`, for models without a template. `zephyr` needs no token but EOS."""


def load_tokenizer(
    source: str | Path, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub id, left-padding, with a pad token of its own.

    If pad = EOS, the end of a response is masked as padding and the model never learns to stop. A pad token is never
    sampled, so no text may contain it either. A tokenizer whose pad token is missing, or is EOS, BOS, the unknown
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
        raise ModelError(f"tokenizer of {name!r} cannot be loaded: {loading_reason(error)}") from error
    tokenizer.padding_side = "left"
    tokenizer.source_class = _named_class(name)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template in a file, or of a name: one of the tokenizer's own, or of `CHAT_TEMPLATES`."""
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
    """Save a tokenizer so that transformers 4 reads it as well.

    transformers 5 renames the class of many tokenizers to one that earlier versions lack, and a list of special tokens
    to a name that they expect a mapping under. So the class is the one that the source named.
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
    """The class of a tokenizer in its own configuration; None if that names no class."""
    path = Path(source, CONFIG_FILE) if os.path.isdir(source) else try_to_load_from_cache(source, CONFIG_FILE)
    try:
        named = json.loads(Path(str(path)).read_bytes()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return None
    return named if isinstance(named, str) and named else None


def growth_of_normalizer(source: str) -> float:
    """Times that a local tokenizer's normalizer can make a text longer, in characters; 1 where there is none."""
    try:
        content: Any = json.loads(Path(source, "tokenizer.json").read_bytes())
    except (OSError, ValueError):
        return 1.0  # whatever is wrong with it, its loader says
    return _growth(content.get("normalizer") if isinstance(content, dict) else None)


def _growth(normalizer: Any) -> float:
    """Of one normalizer, or of a sequence of them."""
    if not isinstance(normalizer, dict):
        return 1.0
    if normalizer.get("type") != "Replace":
        inner = normalizer.get("normalizers")
        return math.prod(map(_growth, inner)) if isinstance(inner, list) else 1.0
    pattern, content = normalizer.get("pattern"), len(str(normalizer.get("content", "")))
    text = str(pattern.get("String", "")) if isinstance(pattern, dict) else ""
    # A regular expression may match single characters, or the empty text between them.
    return max(1.0, content / len(text) if text else 1.0 + content)


def drop_empty_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Remove special tokens that are the empty text: their id would be the unknown token's."""
    for name in ("unk_token", "eos_token", "pad_token"):
        if getattr(tokenizer, name) == "":
            setattr(tokenizer, name, None)


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add a pad token unless the tokenizer has one that serves as nothing else and that no text needs."""
    others = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id, end_of_turn(tokenizer))
    if tokenizer.pad_token_id in (None, *others) or len(str(tokenizer.pad_token)) == 1:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
