"""kedge's `trained_tokens`: its tokenizer, sampler and player, with a model that says what the case's policy says."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from kedge.algorithm.experience import Rollout
from kedge.data import Prompt, encode_prompt
from kedge.data.chat import render_prompt
from kedge.models.tokenizers import load_tokenizer
from kedge.rollout import Sampler
from kedge.rollout.episodes import Limits
from kedge.rollout.player import Player
from kedge_base.environment_turn import EnvironmentTurn
from ppo_conformance.adapters.transformers_tokens import tokenizer_of

LIMIT = 999


def trained_tokens(case: Mapping[str, Any]) -> dict[str, Any]:
    """The rows that kedge trains on, one per action, each after the tokens that it follows in the rollout."""
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig().save_pretrained(folder)
        tokenizer_of(case).save_pretrained(folder)
        tokenizer = load_tokenizer(folder)
    model = _Model(case, len(tokenizer))
    sampler = Sampler(model, int(tokenizer.pad_token_id), case["stop_ids"], case["limits"][0], temperature=0.0)  # pyright: ignore
    prompt = Prompt(render_prompt(tokenizer, case["messages"]), {"messages": case["messages"]})
    if not case["replies"] and not case["stop_strings"]:
        rollout = sampler.generate([encode_prompt(tokenizer, prompt.text)], seeds=[0])
        return {"rows": [_row(rollout)]}
    player = Player(_Replies(case), Limits(turns=len(case["limits"]), tokens=LIMIT), by_turn=True)  # pyright: ignore
    player.begin(case["stop_ids"], None, None, tokenizer, [])
    sampler = sampler.with_sampling(max_new_tokens=LIMIT, temperature=0.0)
    rollout = sampler.generate([], seeds=[0], dialogue=player.episodes(tokenizer, [prompt], [0]))
    contexts = rollout.contexts(rollout.action_mask)
    actions = rollout.response_ids[rollout.action_mask].tolist()
    read = [contexts.paths[path][: place + 1] for path, place in contexts.states]
    return {
        "rows": [
            {"tokens": [*before, action], "trained": [False] * len(before) + [True]}
            for before, action in zip(read, actions, strict=True)
        ]
    }


def _row(rollout: Rollout) -> dict[str, list[Any]]:
    """A row without turns of another side."""
    tokens = torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1)
    reads = torch.cat([rollout.prompt_mask, rollout.token_mask], dim=1)
    trained = torch.cat([torch.zeros_like(rollout.prompt_mask), rollout.action_mask], dim=1)
    return {"tokens": tokens[reads].tolist(), "trained": trained[reads].tolist()}


class _Model:
    """A model whose most likely token is the next one of the policy's turn; after its last one, any other.

    Args:
        case: The case.
        vocab_size: Number of tokens.
    """

    device = torch.device("cpu")
    value_head = None

    def __init__(self, case: Mapping[str, Any], vocab_size: int) -> None:
        self._policy = case["policy"]
        self._vocab_size = vocab_size
        self.trunk = self
        self.hidden = torch.zeros(1, 1)
        self._turn: list[int] = []

    def decoder(self, texts: Sequence[Sequence[int]], **_: Any) -> _Model:
        """Read the only row's text, before a turn of the policy."""
        self._turn = [*self._policy(texts[0])]
        return self

    def step(self, *_: Any) -> None:
        """Read the token that was sampled last."""

    def over_logits(self, function: Any, hidden: Tensor, *more: Tensor) -> Any:
        """The next token, with certainty."""
        logits = torch.zeros(len(hidden), self._vocab_size)
        logits[:, self._turn.pop(0) if self._turn else self._vocab_size - 2] = 99.0
        return function(logits, *more)


class _Replies:
    """An environment that gives the case's replies, in kedge's `Environment`."""

    name, failure, tools = "replies", "", None

    def __init__(self, case: Mapping[str, Any]) -> None:
        self._case = case
        self._turns = 0

    def open(self, episodes: Mapping[int, Any]) -> dict[int, Any]:
        """Begin with the prompt."""
        return {number: self._answer([]) for number in episodes}

    def step(self, said: Mapping[int, Any]) -> dict[int, Any]:
        """Give the next reply, or end."""
        self._turns += 1
        replies = self._case["replies"]
        goes_on = self._turns <= len(replies)
        return {number: self._answer(replies[self._turns - 1] if goes_on else None) for number in said}

    def finish(self, episodes: Mapping[int, Any]) -> dict[int, float]:
        """Give no reward."""
        return dict.fromkeys(episodes, 0.0)

    def _answer(self, messages: list[dict[str, str]] | None) -> EnvironmentTurn:
        limits = self._case["limits"]
        return EnvironmentTurn(
            messages or [],
            ending=None if messages is not None else "completed",
            max_tokens=limits[min(self._turns, len(limits) - 1)],
            stop=self._case["stop_strings"],
        )
