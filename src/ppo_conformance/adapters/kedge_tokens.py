"""kedge's `trained_tokens`: its tokenizer, sampler and player, with a model that plays the case's policy."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import torch
from transformers import LlamaConfig

from kedge.data import Prompt, encode_prompt
from kedge.data.chat import render_prompt
from kedge.models.tokenizers import load_tokenizer
from kedge.rollout import Sampler
from kedge.rollout.episodes import Limits
from kedge.rollout.player import Player
from kedge_base.environment_turn import EnvironmentTurn
from ppo_conformance.adapters.transformers_tokens import tokenizer_of

LIMIT = 999


def trained_tokens(case):
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
        read, said, own = (
            table[0].tolist() for table in (rollout.prompt_ids, rollout.response_ids, rollout.action_mask)
        )
        return {"rows": [{"tokens": read + said, "trained": [False] * len(read) + own}]}
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


class _Model:
    """A model whose most likely token is the next one of the policy's turn; arbitrary after the turn's last.

    Args:
        case: The case.
        vocab_size: Number of tokens.
    """

    device = torch.device("cpu")
    value_head = None

    def __init__(self, case, vocab_size):
        self._policy = case["policy"]
        self._vocab_size = vocab_size
        self.trunk = self
        self.hidden = torch.zeros(1, 1)
        self._turn: list[int] = []

    def decoder(self, texts, **_):
        """Read the only row's text, before a turn of the policy."""
        self._turn = [*self._policy(texts[0])]
        return self

    def step(self, *_):
        """Read the token that was sampled last."""

    def over_logits(self, function, hidden, *more):
        """The next token, with certainty."""
        logits = torch.zeros(len(hidden), self._vocab_size)
        logits[:, self._turn.pop(0) if self._turn else self._vocab_size - 2] = 99.0
        return function(logits, *more)


class _Replies:
    """An environment that gives the case's replies, in kedge's `Environment`."""

    name, failure, tools = "replies", "", None

    def __init__(self, case):
        given = zip([[], *case["replies"], []], [*case["limits"], LIMIT], strict=True)
        *turns, last = (EnvironmentTurn(said, max_tokens=limit, stop=case["stop_strings"]) for said, limit in given)
        self._turns = iter([*turns, replace(last, ending="completed")])

    def open(self, episodes):
        """Give the next turn; the first one leaves the prompt as it is."""
        return {number: next(self._turns) for number in episodes}

    step = open

    def finish(self, episodes):
        """Give no reward."""
        return dict.fromkeys(episodes, 0.0)
