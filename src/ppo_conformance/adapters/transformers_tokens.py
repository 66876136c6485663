"""The tokenizer of a case of `trained_tokens`, as transformers has it."""

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


def tokenizer_of(case):
    """The case's tokenizer with its chat template and the names of its special tokens."""
    names = {f"{name}_token": case[name] or None for name in ("bos", "eos", "pad")}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(case["tokenizer"]), **names)
    made.chat_template = case["chat_template"]
    return made
