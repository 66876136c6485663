"""A batch of episodes that are being played: the tokens of both sides, and how each episode ends."""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import ENDINGS, Rollout
from kedge.data import Prompt
from kedge.data.fields import Messages
from kedge.data.records import RowError
from kedge.data.turns import Turns
from kedge.rollout.engine import Reply
from kedge.rollout.environment import Environment, Said
from kedge.rollout.privileged import PrivilegedText
from kedge_base.environment_turn import EnvironmentTurn
from kedge_base.errors import DataError, EnvError
from kedge_base.thoughts import opened_thought
from kedge_base.workers.codec import own_copy

CUT_OFF = ("truncated", "context_overflow", "timeout")
"""Endings from outside the task: the final state has a value, which the critic estimates."""

LONGEST_MARK = 40
"""Number of final tokens in which the tag of a thought is looked for."""

_NUMBERS = itertools.count()

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Limits:
    """The limits of an episode.

    Attributes:
        turns: Turns of the policy.
        tokens: Tokens of both sides after the prompt.
        turn_tokens: Tokens of one turn of the policy; None for all remaining tokens.
        prompt_tokens: Tokens that it may open with; None for no limit.
        context_tokens: Tokens that a turn may read and sample; None for no limit.
        on_error: The effect of a failed call: the run ends, or the episode has no score.
    """

    turns: int
    tokens: int
    turn_tokens: int | None = None
    prompt_tokens: int | None = None
    context_tokens: int | None = None
    on_error: Literal["stop", "drop"] = "drop"


@dataclass(frozen=True)
class _Turn:
    """A turn of the policy.

    Attributes:
        num_read: Tokens of its context.
        read: Its context as messages; None where it is not needed.
        tools: The schemas of the tools that an agent passed with it.
        end: The slot of its last token.
        num_said: Number of its tokens.
    """

    num_read: int
    read: Messages | None
    tools: Sequence[Mapping[str, Any]] | None = None
    end: int = -1
    num_said: int = 0


@dataclass
class Episode:
    """An episode that is being played.

    Attributes:
        number: The environment's number for it.
        prompt: The tokens that it opened with.
        tokens: The tokens of both sides after it.
        parents: The slots that do not follow the slot before them; see `Rollout.parents`.
        turns: The policy's turns; the last one may be under way.
        opening: The tag of a thought that was opened for the policy's turn; parsing tool calls needs it.
        asked: The environment's answer before the turn that is under way.
        is_agents: An agent wrote the first context, and writes the others.
        slots: Finds the slots of a token by the slot before it and its id.
    """

    number: int
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parents: dict[int, int] = field(default_factory=dict)
    turns: list[_Turn] = field(default_factory=list)
    calls: int = 0
    errors: int = 0
    changed: int = 0
    ending: str = ""
    opening: str = ""
    asked: EnvironmentTurn | None = None
    is_agents: bool = False
    rewards: dict[int, float] = field(default_factory=dict)
    privileged: Mapping[str, Any] = field(default_factory=dict)
    slots: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of both sides since the opening."""
        return len(self.tokens)

    @property
    def stops(self) -> list[str]:
        """The strings that end the turn that is under way."""
        return [stop for stop in (self.asked.stop if self.asked else ()) if stop]

    def known(self, ids: Sequence[int], after: int | None = None) -> tuple[int, int]:
        """Find how much of a context's start, or of what follows a slot, the episode has already read: the number of
        tokens, and the slot of the last one.
        """
        ends = [-len(self.prompt) - 1 if after is None else after]
        for count, token in enumerate(ids):
            following = [slot for end in ends for slot in self.slots.get((end, token), ())]
            if not following:
                return count, ends[-1]
            ends = following
        return len(ids), ends[-1]

    def opens(self, tokens: list[int]) -> None:
        """Set the tokens that the episode opens with."""
        self.prompt = tokens
        self.slots = {(slot - 1, token): [slot] for slot, token in enumerate(tokens, -len(tokens))}

    def add(self, tokens: Sequence[int], parent: int | None = None) -> None:
        """Add tokens of either side; the first may follow an earlier slot."""
        if parent is not None:
            self.parents[self.length] = parent
        before = self.parents.get(self.length, self.length - 1)
        for slot, token in enumerate(tokens, self.length):
            self.slots.setdefault((before, token), []).append(slot)
            before = slot
        self.tokens += tokens


@dataclass
class WaitingTime:
    """Seconds that sampling has waited for an environment."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Episodes:
    """The other side of a batch of conversations; see `kedge.rollout.engine.Dialogue`.

    Args:
        environment: The environment.
        turns: For each episode, the tokens around the policy's turns.
        turns_of: Makes the turns of a context that an environment wrote, from a prompt or None, and tool schemas.
        tokenizer: The policy's.
        prompts: The row of each episode.
        seeds: A seed for each.
        limits: The limits.
        stop_ids: The tokens that end a turn of the policy.
        waited: Counts the environment's seconds.
        privileged: The critic's privileged information.
    """

    environment: Environment
    turns: Sequence[Turns]
    turns_of: Callable[[Prompt | None, Sequence[Mapping[str, Any]] | None], Turns]
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    limits: Limits
    stop_ids: Collection[int]
    waited: WaitingTime
    privileged: PrivilegedText | None = None
    _played: dict[int, Episode] = field(default_factory=dict)

    @property
    def longest_turn(self) -> int:
        """See `Dialogue`."""
        return min(self.limits.turn_tokens or self.limits.tokens, self.limits.tokens)

    def limit(self, row: int) -> int:
        """See `Dialogue`."""
        episode = self._played[row]
        limits = [self.longest_turn, episode.asked and episode.asked.max_tokens]
        if self.limits.context_tokens is not None:
            limits.append(self.limits.context_tokens - episode.turns[-1].num_read)
        return min(limit for limit in limits if limit is not None)

    def among(self, rows: Sequence[int]) -> Episodes:
        """See `Dialogue`."""
        parts = {name: [getattr(self, name)[row] for row in rows] for name in ("turns", "prompts", "seeds")}
        return replace(self, **parts, _played={})

    def open(self, rows: Sequence[int]) -> list[list[int]]:
        """See `Dialogue`.

        Raises:
            EnvError: The environment failed, and the run should stop.
            DataError: An episode opens with more tokens than there is room for, or cannot be rendered.
        """
        for row in rows:
            known = self._played.get(row)
            self._played[row] = Episode(next(_NUMBERS) if known is None else known.number)
        # Copies: an environment may change its row, which other episodes and a resumed run read again.
        starts = {row: (own_copy(self.prompts[row].row), self.seeds[row]) for row in rows}
        opened = self._call(self.environment.open, starts)
        return [self._opening(row, opened[row]) for row in rows]

    def kept(self, said: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """See `Dialogue`."""
        found: dict[int, int] = {}
        for row, tokens in said.items():
            has_ended = partial(self._has_ended, self._played[row].stops, tokens)
            if has_ended(len(tokens)):
                found[row] = 1 + bisect_left(range(1, len(tokens)), True, key=has_ended)
        return found

    def _has_ended(self, stops: Sequence[str], tokens: Sequence[int], count: int) -> bool:
        """True if the first tokens of a turn contain one of the strings that end it."""
        text = str(self.tokenizer.decode([*tokens[:count]])) if stops else ""
        return any(stop in text for stop in stops)

    def answer(self, said: Mapping[int, Sequence[int]]) -> dict[int, Reply | None]:
        """See `Dialogue`."""
        for row, tokens in said.items():
            episode = self._played[row]
            episode.add(tokens)
            episode.turns[-1] = replace(episode.turns[-1], end=episode.length - 1, num_said=len(tokens))
        texts = {row: self._said(row, tokens) for row, tokens in said.items() if not self._played[row].ending}
        turns = self._call(self.environment.step, texts)
        answers: dict[int, Reply | None] = dict.fromkeys(said)
        answers |= {row: self._after(row, said[row], turn) for row, turn in turns.items()}
        # The environment has already ended episodes with its own endings.
        self._finish(row for row, turn in turns.items() if answers[row] is None and turn.ending is None)
        return answers

    def rows(self) -> list[Mapping[str, Any] | None]:
        """Each prompt's row, with the environment's privileged information; None for an episode that failed."""
        return [
            None if episode.ending == "failed" else {**prompt.row, **episode.privileged}
            for prompt, episode in zip(self.prompts, self._played.values(), strict=True)
        ]

    def end(self) -> None:
        """End episodes that were only opened as a test."""
        self._finish(self._played)

    def finished(self, rollout: Rollout) -> Rollout:
        """See `Dialogue`."""
        rewards = torch.zeros_like(rollout.logprobs)
        device = rewards.device
        for row, episode in self._played.items():
            for slot, reward in episode.rewards.items():
                rewards[row, slot] = reward
            if episode.ending == "failed":
                rewards[row] = math.nan
        if self.privileged is not None:
            rollout = self.privileged.added(rollout, self.rows(), self.tokenizer)
        episodes = self._played.values()
        return replace(
            rollout,
            rewards=rewards,
            ending=torch.tensor([ENDINGS.index(each.ending) for each in episodes], device=device),
            cut_off=torch.tensor([each.ending in CUT_OFF for each in episodes], device=device),
            calls=torch.tensor([[each.calls, each.errors, each.changed] for each in episodes], device=device),
        )

    def _finish(self, rows: Iterable[int]) -> None:
        """End episodes, and add the environment's final rewards."""
        for row, end in self._call(self.environment.finish, dict.fromkeys(rows)).items():
            if end is None:
                self._fail(row)
            else:
                self._pay(row, end)

    def _call(
        self, method: Callable[[dict[int, _Argument]], Mapping[int, _Result]], rows: Mapping[int, _Argument]
    ) -> dict[int, _Result]:
        """Call a method of the environment with its arguments by episode number, and measure the time."""
        numbers = {self._played[row].number: row for row in rows}
        started = time.perf_counter()
        found = method({number: rows[row] for number, row in numbers.items()})
        self.waited.seconds += time.perf_counter() - started
        return {row: found[number] for number, row in numbers.items()}

    def _fail(self, row: int) -> None:
        """Record that the environment failed in an episode, which ends with the policy's turn."""
        if self.limits.on_error == "stop":
            raise EnvError(self.environment.failure)
        self._played[row].ending = "failed"

    def _opening(self, row: int, opened: EnvironmentTurn | None) -> list[int]:
        """Return the tokens that an episode opens with; a failed one ends after the policy's turn."""
        episode = self._played[row]
        if opened is None:
            self._fail(row)
        try:
            conversation, tokens = self._opening_tokens(row, opened)
        except RowError as error:
            if opened is None or opened.context is None:
                raise DataError(str(error)) from error
            # An agent writes its first request as it plays, so a bad one is a failure of its episode.
            self._finish([row])
            self.environment.failure = str(error)
            return self._opening(row, None)
        if opened is not None:
            episode.privileged = opened.privileged
            episode.asked = opened
            episode.is_agents = opened.context is not None
        episode.opens(tokens)
        self._begins(row, tokens, len(tokens), conversation)
        return tokens

    def _opening_tokens(self, row: int, opened: EnvironmentTurn | None) -> tuple[Messages, list[int]]:
        """Return an opening as messages and as tokens.

        Raises:
            RowError: It cannot be rendered, or does not fit.
        """
        name = self.environment.name
        turns = self.turns[row]
        try:
            if opened is None or opened.context is None:
                follows: Messages = [{"role": "user", "content": "…"}] if opened is None else opened.messages
                conversation = turns.opening(self.prompts[row], follows)
            else:
                turns = self.turns_of(None, opened.tools)
                conversation = opened.context
            tokens = turns.context(_shown(conversation))
        except RowError as error:
            raise RowError(f"{name} cannot open an episode: {error}") from error
        most = self.limits.prompt_tokens
        if not tokens or (most is not None and len(tokens) > most):
            raise RowError(
                f"an episode of {name} opens with {len(tokens)} tokens (prompt, tools and what reset says); expected 1 "
                f"to {most}: the model's context less rollout.max_new_tokens, or, where it is shorter, less "
                "environment.max_turn_tokens"
            )
        return conversation, tokens

    def _said(self, row: int, tokens: Sequence[int]) -> Said:
        """Describe a turn, without its final stop token, unless that may be the tag that closes a call."""
        episode = self._played[row]
        ids = list(tokens)
        stops = bool(ids) and ids[-1] in self.stop_ids
        text = str(self.tokenizer.decode(ids[:-1] if stops else ids))
        closing = str(self.tokenizer.decode(ids[-1:])) if stops and self._has_tools(episode) else ""
        if closing.startswith("</") and f"<{closing[2:]}" in text:  # unlike `</s>`, the end token of some models
            text += closing
        ends = [place for stop in episode.stops if (place := text.find(stop)) >= 0]
        return {
            "text": episode.opening + text[: min(ends, default=None)],
            "num_tokens": len(tokens),
            "num_read": episode.turns[-1].num_read,
            "is_complete": stops or bool(ends),
        }

    def _has_tools(self, episode: Episode) -> bool:
        """True if the policy may call tools in the turn that is under way."""
        return bool(self.environment.tools or (episode.asked and episode.asked.tools))

    def _begins(self, row: int, tokens: Sequence[int], num_read: int, read: Messages | None) -> None:
        """Begin a turn of the policy; a thought may have been opened for it.

        Args:
            row: The episode.
            tokens: The tokens that it reads, at least the last ones.
            num_read: Their number.
            read: The conversation in messages, if it is needed.
        """
        episode = self._played[row]
        episode.turns.append(_Turn(num_read, read and _shown(read), episode.asked and episode.asked.tools))
        episode.opening = ""
        if self._has_tools(episode):
            episode.opening = opened_thought(str(self.tokenizer.decode([*tokens[-LONGEST_MARK:]])))

    def _after(self, row: int, said: Sequence[int], turn: EnvironmentTurn) -> Reply | None:
        """Return what the policy reads after a turn; None if the episode has ended."""
        episode = self._played[row]
        self._pay(row, turn)
        episode.calls += turn.num_calls
        episode.errors += turn.num_errors
        episode.changed += turn.num_changed
        if turn.ending == "failed":
            self._fail(row)
        has_room = episode.length < self.limits.tokens or said[-1] in self.stop_ids
        # With tools, an answer without a call ends an episode, unless it was cut off at the token limit.
        if turn.ending is not None and (has_room or turn.ending != "completed" or not self.environment.tools):
            episode.ending = turn.ending
            return None
        if episode.length >= self.limits.tokens:
            episode.ending = "max_tokens"
            return None
        if len(episode.turns) >= self.limits.turns:
            episode.ending = "max_turns"
            return None
        last = episode.turns[-1]
        try:
            turns = self.turns_of(None, turn.tools) if episode.is_agents else self.turns[row]
            if (read := turn.context) is None and turns.rewrites:
                assert last.read is not None
                answer = {"role": "assistant", "content": self._said(row, said)["text"]}
                read = [*last.read, answer, *turn.messages]
            if read is None:
                reply = Reply(tokens := turns.after(said, turn.messages))
                num_read = last.num_read + len(said) + len(tokens)
            else:
                tokens, num_read, reply = self._new_context(episode, turns, read, turn.tools)
        except RowError as error:
            fault = f"an answer of {self.environment.name} cannot be written as a message: {error}"
            if turn.context is None:
                raise DataError(fault) from error
            self.environment.failure = fault
            self._fail(row)
            return None
        longest = math.inf if self.limits.context_tokens is None else self.limits.context_tokens
        if episode.length + len(reply.tokens) >= self.limits.tokens or num_read >= longest:
            episode.ending = "context_overflow"
            return None
        episode.add(reply.tokens, reply.parent)
        episode.asked = turn
        self._begins(row, tokens, num_read, read)
        return reply

    def _new_context(
        self, episode: Episode, turns: Turns, read: Messages, tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Sequence[int], int, Reply]:
        """Return the end of a context or all of it, its number of tokens, and the tokens new to the episode.

        An answer of the policy keeps its sampled tokens if the tools and everything before it are unchanged.
        """
        shown = _shown(read)
        answers = [
            (place, episode.turns[int(each["answer"])]) for place, each in enumerate(read[:-1]) if "answer" in each
        ]
        for place, before in reversed(answers):
            if before.read == shown[:place] and before.tools == tools and not turns.rewrites:
                ids = turns.after([episode.tokens[before.end]], shown[place + 1 :])
                num_before, start = before.num_read + before.num_said, before.end
                break
        else:
            ids = turns.context(shown) if read else []
            num_before, start = 0, None
            if not ids:
                raise RowError("the new context is empty")
        count, slot = episode.known(ids, start)
        return ids, num_before + len(ids), Reply(ids[count:], None if slot == episode.length - 1 else slot)

    def _pay(self, row: int, turn: EnvironmentTurn) -> None:
        """Add a reward at the policy's last token so far, and those of single turns at their last tokens."""
        episode = self._played[row]
        paid = [(episode.length - 1, turn.reward)]
        paid += [(each.end, reward) for each, reward in zip(episode.turns, turn.rewards, strict=bool(turn.rewards))]
        for slot, reward in paid:
            episode.rewards[slot] = episode.rewards.get(slot, 0.0) + reward


def _shown(conversation: Messages) -> Messages:
    """The messages as a chat template gets them."""
    return [{key: value for key, value in message.items() if key != "answer"} for message in conversation]
