"""Sets how the tokenizer of a GGUF file splits a text before it merges bytes or characters.

`gguf_splits.txt` has the rules: their names in `tokenizer.ggml.pre`, then regular expressions, one per line. The
matches of each, and the text between them, are split by the next. The expressions are from the models'
`tokenizer.json`; the names and the rule `default` are from llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from kedge_base.errors import ModelError

PREFIX = "tokenizer.ggml.add_space_prefix"
WHOLE = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken"
"""Rules of tokenizers that keep a piece that is itself a token without applying merges, and that add BOS."""


def follow_splits(tokenizer: PreTrainedTokenizerBase, stated: Mapping[str, Any]) -> None:
    """Make a tokenizer split texts by the rule that its file names.

    Raises:
        ModelError: The file names no rule, or an unknown one.
    """
    backend: Any = tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    kind: Any = stated.get("tokenizer.ggml.model")
    pre: Any = stated.get("tokenizer.ggml.pre")
    if kind == "gpt2":
        if (rules := _rules().get(pre)) is None:
            fault = "missing" if pre is None else f"{pre!s:.40}, which kedge does not know"
            raise ModelError(
                f"tokenizer.ggml.pre, the rule by which texts are split, is {fault}; use the original model"
            )
        steps: list[Any] = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in rules]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if pre.startswith("qwen"):
            backend.normalizer = normalizers.NFC()
        if pre in WHOLE.split():
            backend.model.ignore_merges = True
            tokenizer.add_bos_token = stated.get("tokenizer.ggml.add_bos_token", True)
    # Gemma's tokenizer (with "Split") never adds a prefix.
    elif kind == "llama" and "Split" not in str(backend.pre_tokenizer) and not stated.get(PREFIX, True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.normalizer = None
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _rules() -> dict[str, list[str]]:
    """The expressions of each rule."""
    blocks = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").strip().split("\n\n")
    return {name: rules for names, *rules in map(str.splitlines, blocks) for name in names.split()}
