"""Plays episodes of several turns, with an environment as the other side of the policy's conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import ENDINGS, Rollout
from kedge.data import Prompt, Rendered
from kedge.data.turns import PlainTurns, TemplateTurns, ToolUse, Turns
from kedge.rollout.environment import Environment, EnvironmentReward
from kedge.rollout.episodes import Episodes, Limits, WaitingTime
from kedge.rollout.privileged import PrivilegedText
from kedge_base.errors import DataError, EnvError

FAILED = ENDINGS.index("failed")
MOST_FORMATS = 1024
"""Formats of turns to keep: an agent may show other tools for each row."""


class Player:
    """Plays episodes of an environment with the policy.

    Args:
        environment: The environment.
        limits: The limits of an episode.
        by_turn: Place each turn's reward at the turn's last token; see `EnvironmentReward`.
        say: Prints a line to the user about the policy's chat template.
    """

    def __init__(
        self, environment: Environment, limits: Limits, *, by_turn: bool, say: Callable[[str], None] | None = None
    ) -> None:
        self.environment = environment
        self.reward = EnvironmentReward(environment.name, by_turn=by_turn)
        self._limits = limits
        self._say = say
        self._stop_ids: frozenset[int] = frozenset()
        self._privileged: PrivilegedText | None = None
        self._turns: dict[tuple[int, bool, str | None], Turns] = {}
        self._told: set[str] = set()
        self._waited = WaitingTime()
        self._waited_before = 0.0

    @property
    def turn_tokens(self) -> int | None:
        """Tokens of one turn of the policy, if they are limited."""
        return self._limits.turn_tokens

    def begin(
        self,
        stop_ids: Collection[int],
        prompt_tokens: int | None,
        context_tokens: int | None,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        privileged: PrivilegedText | None = None,
    ) -> None:
        """Examine the policy's tokens and template, and try to open an episode, before anything expensive starts.

        Args:
            stop_ids: The tokens that end a turn.
            prompt_tokens: Tokens that an episode may open with; None for no limit.
            context_tokens: The context length of the models; None for no limit.
            tokenizer: The policy's.
            prompts: A row to try; may be empty.
            privileged: The critic's privileged information.

        Raises:
            EnvError: The environment failed.
            DataError: A conversation cannot continue with this chat template, opens with too many tokens, or lacks
                privileged information.
        """
        self._stop_ids = frozenset(stop_ids)
        self._privileged = privileged
        self._limits = replace(self._limits, prompt_tokens=prompt_tokens, context_tokens=context_tokens)
        if prompts:
            trial = self.episodes(tokenizer, prompts, [0])
            trial = replace(trial, limits=replace(trial.limits, on_error="stop"))
            trial.open([0])
            if privileged is not None:
                privileged.ids(trial.rows()[0] or {}, tokenizer, f"an episode of {self.environment.name}")
            trial.end()

    def episodes(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        *,
        max_new_tokens: int | None = None,
    ) -> Episodes:
        """The other side of a batch of conversations.

        Args:
            tokenizer: The policy's.
            prompts: A row of the data for each.
            seeds: A seed for each.
            max_new_tokens: Tokens of both sides, if fewer than the player's limit, for example because of a schedule.
        """
        turns = [self._turns_of(tokenizer, prompt) for prompt in prompts]
        limits = replace(self._limits, tokens=max_new_tokens or self._limits.tokens)
        given = (tokenizer, prompts, seeds, limits, self._stop_ids, self._waited, self._privileged)
        return Episodes(self.environment, turns, partial(self._turns_of, tokenizer), *given)

    def check(self, rollout: Rollout) -> Rollout:
        """Check the episodes that were played.

        Raises:
            EnvError: The environment failed in all of them, for example because of a bug in it.
        """
        if rollout.ending is not None and (rollout.ending == FAILED).all():
            raise EnvError(f"{self.environment.failure or self.environment.name}: it failed in all episodes")
        return rollout

    def metrics(self, rollout: Rollout, sampled: Sequence[Rollout] = ()) -> dict[str, float]:
        """Compute metrics of an update's episodes: turns, endings, tools, and the environment's seconds.

        Args:
            rollout: The episodes that have a score. Responses from elsewhere have no metrics.
            sampled: All episodes that were played, including those in which the environment failed.
        """
        if rollout.ending is None:
            return {}
        endings = [
            ending for each in sampled or [rollout] if each.ending is not None for ending in each.ending.tolist()
        ]
        assert rollout.turn_starts is not None
        assert rollout.parents is not None
        slots = torch.arange(rollout.parents.shape[1], device=rollout.parents.device)
        contexts = ((rollout.parents != slots - 1) & rollout.token_mask).sum(-1) + 1
        calls, errors, changed = (0, 0, 0) if rollout.calls is None else rollout.calls.sum(0).tolist()
        # Another thread may be sampling the next episodes, and adding to the sum.
        waited = self._waited.seconds
        before, self._waited_before = self._waited_before, waited
        return {
            "episode/turns": float(rollout.turn_starts.sum(-1).float().mean()),
            **({"episode/contexts": float(contexts.float().mean())} if rollout.branches else {}),
            "episode/length": float(rollout.token_mask.sum(-1).float().mean()),
            **{f"episode/{name}": endings.count(number) / len(endings) for number, name in enumerate(ENDINGS)},
            "time/environment": waited - before,
            **({"episode/changed": changed / len(contexts)} if changed else {}),
            **({"tools/calls": calls / len(contexts)} if calls or self.environment.tools else {}),
            **({"tools/failed": errors / calls} if calls else {}),
        }

    def _turns_of(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Prompt | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Turns:
        """Return the turn format of the chat template, or of plain text.

        Args:
            tokenizer: The policy's.
            prompt: The row that is continued; None for a context of messages that the environment wrote.
            tools: The schemas of the tools; None for those of the environment.
        """
        # A column `messages` may stand beside a plain text.
        is_chat = bool(tokenizer.chat_template) if prompt is None else isinstance(prompt.text, Rendered)
        environment = self.environment
        used = environment.tools if tools is None else environment.tools_of(tools) if tools else None
        if used and not is_chat:
            text = "a context" if prompt is None else f"the prompt {prompt.text[:40]!r}"
            raise DataError(
                f"{environment.name} has tools, and {text} is plain text; tools are called in "
                'conversations: write the prompts as messages, such as {"prompt": [{"role": "user", "content": "…"}]}'
            )
        key = (id(tokenizer), is_chat, None if tools is None else json.dumps(tools))
        if key not in self._turns:
            if len(self._turns) == MOST_FORMATS:
                self._turns.clear()
            self._turns[key] = self._chat_turns(tokenizer, used) if is_chat else PlainTurns(tokenizer)
        return self._turns[key]

    def _chat_turns(self, tokenizer: PreTrainedTokenizerBase, tools: ToolUse | None) -> TemplateTurns:
        turns = TemplateTurns(tokenizer, self._stop_ids, tools=tools)
        if tools and turns.incompatibility:
            self._tell(
                f"the chat template {turns.incompatibility}",
                f"they are described before the first question, and called as {tools.sample_text}",
            )
        if turns.rewrites:
            self._tell(turns.rewriting, "so each turn reads the whole conversation again")
        return turns

    def _tell(self, reason: str, effect: str) -> None:
        """Print a line about the chat template, the first time."""
        if self._say and reason not in self._told:
            self._told.add(reason)
            self._say(f"{self.environment.name}: {reason}; {effect}")
