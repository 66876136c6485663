"""What was sampled is what is trained on: conversations of one and two turns over the forms of public chat templates.

The policy is scripted, and remembers what it read before each of its turns. In what is trained, exactly the tokens of
its turns count, each turn after exactly what the policy had read.

A case has

    tokenizer          a tokenizer of the package `tokenizers`, as JSON
    chat_template, bos, eos, pad, stop_ids
    messages           the conversation before the policy's first turn
    replies            the messages that follow each turn but the last
    limits             the longest each turn may be, in tokens
    stop_strings       strings that end a turn; the policy then stops at the token that completes one
    policy             called with the tokens that are read before a turn; returns those of the turn

An adapter returns {"rows": [{"tokens": […], "trained": […]}, …]}: what a trainer reads, in one row or in several, and
which tokens count in the loss of the policy; with "valued" too, if the loss of a critic counts others.

A later turn may be appended to the tokens so far or read a conversation that is rendered again.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from ppo_conformance.checks import Check
from ppo_conformance.protocol import Adapter, Deviation, NotOffered

QUESTION, ANSWER, REPLY, SECOND = "How deep is it?", "Nine fathoms.", "And now?", "Ten fathoms."
THOUGHT = "<think>\nThe lead says nine.\n</think>\n\n"
SENTINEL = "SENTINEL"
WORDS = ("How", "deep", "is", "it", "Nine", "Ten", "fathoms", "And", "now", "lead", "says", "nine", "user", "think")
"""Words that are one token, with a space before them or without; all other texts are spelled in characters."""

TRAPS = {
    "ordinary": "two answers, each with its end",
    "retokenized": "an answer that the tokenizer would divide otherwise",
    "cut": "the last answer is cut at the limit",
    "empty": "the first answer is only its end",
    "bos_twice": "template and tokenizer both add BOS",
    "eos_is_pad": "the token that ends an answer is the padding",
    "stop_string": "a stop string over two tokens, which ends within the second",
    "thought": "an answer with a thought, which some templates drop later",
}


@cache
def templates() -> dict[str, dict[str, Any]]:
    """The chat templates by name, and what their tokenizers have."""
    found = json.loads(Path(__file__).with_name("templates.json").read_text("utf-8"))
    return {each["name"]: each for each in found}


def cases() -> Iterator[tuple[str, str, int]]:
    """The names of all cases: the trap, the template, and the number of turns."""
    for trap in TRAPS:
        for name, form in templates().items():
            if trap != "bos_twice" or "bos_token" in form["template"]:
                yield from ((trap, name, turns) for turns in ((1,) if trap == "stop_string" else (1, 2)))


@cache
def library(name: str) -> Any:
    """Import a package that only these checks need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotOffered(f"these checks need the package {name.partition('.')[0]}") from error


@cache
def _compiled(template: str) -> Any:
    environment = library("jinja2.sandbox").ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise ValueError(message)


def render(case: Mapping[str, Any], messages: Sequence[Mapping[str, str]]) -> str:
    """The text that a case's template gives, with its special tokens, up to the policy's next turn."""
    names = {"bos_token": case["bos"], "eos_token": case["eos"], "add_generation_prompt": True}
    return _compiled(case["chat_template"]).render(messages=messages, **names)


def tokenizer_json(form: dict[str, Any], *, adds_bos: bool) -> str:
    """Make a tokenizer: byte-level like GPT-2's, or of words that begin with a space like Llama's."""
    tokenizers = library("tokenizers")
    space, bytewise = ("Ġ", True) if form["pieces"] == "bytes" else ("▁", False)
    alphabet = (
        sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) if bytewise else [space, *map(chr, range(33, 127))]
    )
    vocab = {piece: index for index, piece in enumerate([*form["specials"], *alphabet])}
    if not bytewise:
        vocab |= {f"<0x{value:02X}>": len(vocab) + value for value in range(256)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for pair in [*((word[:end], word[end]) for end in range(1, len(word))), (space, word)]:
            if pair not in merges:
                merges.append(pair)
                vocab.setdefault("".join(pair), len(vocab))
    model = tokenizers.models.BPE(
        vocab=vocab, merges=merges, byte_fallback=not bytewise, unk_token=None if bytewise else "<unk>"
    )
    made = tokenizers.Tokenizer(model)
    if bytewise:
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
    else:
        normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
        made.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        made.decoder = decoders.Sequence(
            [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    made.add_special_tokens(form["specials"])
    if adds_bos:
        bos = form["bos"]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab[bos])]
        )
    return made.to_str()


@dataclass
class Policy:
    """A scripted policy that records what it read before each turn.

    Attributes:
        turns: The tokens of each turn.
        read: What it read before each of them so far.
    """

    turns: list[list[int]]
    read: list[list[int]] = field(default_factory=list)

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Return the next turn."""
        if len(self.read) == len(self.turns):
            raise Deviation(f"the policy is asked for a turn more than the conversation has, {len(self.turns)}")
        self.read.append([*map(int, tokens)])
        return self.turns[len(self.read) - 1]


class Conversation:
    """A case, and what is expected of it.

    Args:
        trap: One of `TRAPS`.
        name: Of the template.
        turns: 1 or 2.
    """

    def __init__(self, trap: str, name: str, turns: int) -> None:
        self._form = form = templates()[name]
        written = tokenizer_json(form, adds_bos=trap == "bos_twice")
        self._tokenizer = library("tokenizers").Tokenizer.from_str(written)
        self._specials = [self._tokenizer.token_to_id(each) for each in form["specials"]]
        self._end = self._tokenizer.token_to_id(form["end"])
        said = [ANSWER, SECOND][:turns]
        said[0] = {"thought": THOUGHT + ANSWER, "empty": ""}.get(trap, said[0])
        sampled = [self.encode(text) for text in said]
        if trap == "retokenized":
            sampled[0] = [each for token in sampled[0] for each in self._spelled(token)]
        stops = ["ine fath"] if trap == "stop_string" else []
        if stops:  # there is one turn
            ends = (count for count in range(len(sampled[0])) if stops[0] in self.decode(sampled[0][:count]))
            sampled[0] = sampled[0][: next(ends)]
        for turn in sampled[: turns - (trap in ("stop_string", "cut"))]:
            turn.append(self._end)
        self.policy = Policy(sampled)
        self.messages = [{"role": "user", "content": QUESTION}]
        self.replies = [[{"role": "user", "content": REPLY}]] * (turns - 1)
        self.case = {
            "tokenizer": written,
            "chat_template": form["template"],
            "bos": form["bos"],
            **{name: form["end" if trap == "eos_is_pad" else name] for name in ("eos", "pad")},
            "stop_ids": [self._tokenizer.token_to_id(each) for each in form["stops"]],
            "messages": self.messages,
            "replies": self.replies,
            "limits": [len(turn) if trap == "cut" else len(turn) + 8 for turn in sampled],
            "stop_strings": stops,
            "policy": self.policy,
        }

    def encode(self, text: str) -> list[int]:
        """Token ids, without adding any for the beginning."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._tokenizer.decode([*ids], skip_special_tokens=False)

    def _spelled(self, token: int) -> list[int]:
        """A token as its single characters, which decode to the same text."""
        return [self._tokenizer.token_to_id(each) for each in self._tokenizer.id_to_token(token)]

    def continuations(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the contexts allowed before the second turn, each as text and its special tokens."""
        [read, *_], [said, *_] = self.policy.read, self.policy.turns
        asked, [reply, *_] = self.messages, self.replies
        rest = render(self.case, [*asked, {"role": "assistant", "content": SENTINEL}, *reply]).rpartition(SENTINEL)[2]
        if said[-1] == self._end:
            rest = rest.partition(self._form["end"])[2]
        whole = self.decode([*read, *said]) + rest
        yield whole, [each for each in [*read, *said, *self.encode(rest)] if each in self._specials]
        answer = self.decode(said[:-1] if said[-1] == self._end else said)
        again = render(self.case, [*asked, {"role": "assistant", "content": answer}, *reply])
        yield again, [each for each in self.encode(again) if each in self._specials]

    def check_read(self) -> None:
        """Check what the policy read before each turn."""
        read, said = self.policy.read, self.policy.turns
        if len(read) < len(said):
            raise Deviation(f"the policy was asked for {len(read)} turns of {len(said)}")
        first = self.encode(render(self.case, self.messages))
        if read[0] != first:
            message = "the first turn does not follow the tokens of the rendered prompt"
            raise Deviation(message, "context", self.decode(first), self.decode(read[0]))
        if len(said) > 1:
            # Tokenizers of words add a space at the beginning of a piece.
            noise = "" if self._form["pieces"] == "bytes" else " "
            allowed = [(text.replace(noise, ""), ids) for text, ids in self.continuations()]
            got = self.decode(read[1])
            if (got.replace(noise, ""), [each for each in read[1] if each in self._specials]) not in allowed:
                message = "before the second turn, the policy reads another text than the template writes"
                raise Deviation(message, "context", next(self.continuations())[0], got)

    def check_trained(self, rows: Sequence[dict[str, Any]], kind: str) -> None:
        """Check that the sampled tokens count, each after what the policy had read, and no others."""
        turns = zip(self.policy.read, self.policy.turns, strict=True)
        expected = Counter((*read, *said[: place + 1]) for read, said in turns for place in range(len(said)))
        found = Counter(
            tuple(map(int, row["tokens"][: place + 1]))
            for row in rows for place, counts in enumerate(row[kind]) if counts
        )  # fmt: skip
        for *context, token in expected - found:
            shown = self.decode([token]), self.decode(context)
            raise Deviation(f"a token that was sampled is not {kind}", f"{kind} token {token}", *shown)
        for *context, token in found - expected:
            shown = self.decode([token]), self.decode(context)
            raise Deviation(f"a token is {kind} that was not sampled there", f"{kind} token {token}", None, shown)


def _check(trap: str, name: str, turns: int, adapter: Adapter) -> None:
    conversation = Conversation(trap, name, turns)
    rows = adapter.trained_tokens(conversation.case)["rows"]
    conversation.check_read()
    for kind in ("trained", "valued"):
        if all(kind in row for row in rows):
            conversation.check_trained(rows, kind)


def checks() -> list[Check]:
    """The checks, one for each trap, with a case for each template and number of turns."""
    return [
        Check(f"tokens/{trap}", f"{name}-{turns}", TRAPS[trap], partial(_check, trap, name, turns))
        for trap, name, turns in cases()
    ]
