"""Tokens of a conversation that the reference trainer reads and trains on; needs `tokenizers` and `jinja2`."""

from typing import Any

from ppo_conformance.checks import tokens
from ppo_conformance.protocol import Adapter


class Conversations(Adapter):
    """A row per turn: what the policy read, and its own tokens as they were sampled, which are trained."""

    def trained_tokens(self, case):
        """Play a case of `checks/tokens.py`. Before a later turn, the whole conversation is rendered again."""
        tokenizer = tokens.library("tokenizers").Tokenizer.from_str(case["tokenizer"])
        messages, rows = [*case["messages"]], list[Any]()
        for reply in [*case["replies"], []]:
            read = self.encode(tokenizer, self.render(case, messages))
            sampled = case["policy"](read)
            said = self.kept(tokenizer, sampled)
            rows.append({"tokens": [*read, *said], "trained": [False] * len(read) + [True] * len(said)})
            text = tokenizer.decode(
                [each for each in sampled if each not in case["stop_ids"]], skip_special_tokens=False
            )
            messages += [{"role": "assistant", "content": text}, *reply]
        return {"rows": rows}

    def render(self, case, messages):
        """The text that the policy reads before its next turn, in which the template writes the special tokens."""
        return tokens.render(case, messages)

    def encode(self, tokenizer, text):
        """Encode a text that has its special tokens."""
        return tokenizer.encode(text, add_special_tokens=False).ids

    def kept(self, tokenizer, sampled):
        """The tokens of a turn that are trained: those that were sampled."""
        return sampled
