"""Plays episodes of several turns, with an environment as the other side of the policy's conversations."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypedDict, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import ENDINGS, Rollout
from kedge.data import Prompt, Rendered
from kedge.data.fields import Messages
from kedge.data.records import RowError
from kedge.data.turns import PlainTurns, TemplateTurns, ToolUse, Turns
from kedge.rollout.engine import Reply
from kedge.rollout.privileged import PrivilegedText
from kedge_base.errors import DataError, EnvError
from kedge_base.thoughts import opened_thought
from kedge_base.workers.codec import own_copy

CUT_OFF = ("truncated", "context_overflow", "timeout")
"""Endings from outside the task: the final state has a value, which the critic estimates."""

FAILED = ENDINGS.index("failed")
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
        context_tokens: Tokens that a turn may read and say; None for no limit.
        on_error: The effect of a failed call: the run ends, or the episode has no score.
    """

    turns: int
    tokens: int
    turn_tokens: int | None = None
    prompt_tokens: int | None = None
    context_tokens: int | None = None
    on_error: Literal["stop", "drop"] = "drop"


class Said(TypedDict):
    """A turn of the policy, as an environment gets it.

    Attributes:
        text: The turn without its stop token, cut at a stop string.
        num_tokens: Tokens sampled.
        num_read: Tokens that the policy read before.
        is_complete: It ended with a stop token or string, not at a limit.
    """

    text: str
    num_tokens: int
    num_read: int
    is_complete: bool


@dataclass(frozen=True)
class _Turn:
    """A turn of the policy.

    Attributes:
        num_read: Tokens of its context.
        read: Its context as messages; None where it is not needed.
        end: The slot of its last token.
        num_said: Its tokens.
    """

    num_read: int
    read: Messages | None
    end: int = -1
    num_said: int = 0


@dataclass
class _State:
    """An episode that is being played.

    Attributes:
        number: The environment's number for it.
        prompt: The tokens that it opened with.
        tokens: Those of both sides since.
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
    asked: Answer | None = None
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

    def known(self, ids: Sequence[int]) -> tuple[int, int]:
        """Find how much of a context's start the episode has already read: the number of tokens, and the slot of the
        last one.
        """
        ends = [-len(self.prompt) - 1]
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
class _WaitingTime:
    """Seconds that sampling has waited for an environment."""

    seconds: float = 0.0


class Answer(Protocol):
    """The answer of an environment to a turn of the policy."""

    @property
    def messages(self) -> Messages:
        """The messages that the policy reads next."""
        ...

    @property
    def reward(self) -> float:
        """The reward of the policy's turn."""
        ...

    @property
    def ending(self) -> str | None:
        """How the episode ended; None if it continues."""
        ...

    @property
    def num_calls(self) -> int:
        """Number of tool calls of the policy."""
        ...

    @property
    def num_errors(self) -> int:
        """Number of failed calls."""
        ...

    @property
    def num_changed(self) -> int:
        """Number of new messages of an assistant in `context` that the policy has not written."""
        ...

    @property
    def privileged(self) -> Mapping[str, Any]:
        """The critic's privileged information about an episode that was opened, by name."""
        ...

    @property
    def context(self) -> Messages | None:
        """The whole conversation that the policy reads next, instead of what it has read so far; None to add
        `messages` to that.

        An answer of the policy that is left as it was has the number of its turn in `answer`.
        """
        ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The schemas of the tools to show in `context`; None for those of the environment."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Limit of the policy's next turn."""
        ...

    @property
    def stop(self) -> Sequence[str]:
        """Strings that end the policy's next turn."""
        ...

    @property
    def rewards(self) -> Sequence[float]:
        """The reward of each turn of the policy so far, where they are known at the end; empty otherwise."""
        ...


class Environment(Protocol):
    """The other side of episodes, which are identified by number.

    Attributes:
        name: Its name in errors.
        failure: The message about the last failed call.
        is_scored: Whether it rewards episodes.
    """

    name: str
    failure: str
    is_scored: bool

    @property
    def tools(self) -> ToolUse | None:
        """The tools that the policy may call."""
        ...

    def tools_of(self, schemas: Sequence[Mapping[str, Any]]) -> ToolUse:
        """The tools with some JSON schemas."""
        ...

    def open(self, episodes: Mapping[int, tuple[Mapping[str, Any], int]]) -> Mapping[int, Answer | None]:
        """Start episodes, each with a row of the data and a seed; return what follows the prompt, or None for a
        failure.
        """
        ...

    def step(self, said: Mapping[int, Said]) -> Mapping[int, Answer]:
        """Send a turn of the policy to each of some episodes."""
        ...

    def finish(self, episodes: Iterable[int]) -> Mapping[int, Answer | None]:
        """End episodes; return the rewards of each beyond those of its turns, or None for a failure."""
        ...

    def close(self) -> None:
        """End the environment's process, if any."""
        ...


class EnvironmentReward:
    """A reward source that returns an environment's rewards.

    Args:
        name: The environment's name.
        by_turn: Place each turn's reward at the turn's last token; otherwise their sum is the response's score.
    """

    def __init__(self, name: str, *, by_turn: bool) -> None:
        self.name = name
        self.models: Mapping[str, Any] = {}
        self._by_turn = by_turn

    def check(self, columns: Collection[str]) -> None:
        """Do nothing, because an environment reads the rows itself."""

    def score(self, responses: Any) -> list[Any]:
        """Return each response's rewards per token, or their sum; None for failed episodes and other responses."""
        if not responses.paid:
            return [None] * len(responses)
        return [None if math.isnan(sum(row)) else row if self._by_turn else sum(row) for row in responses.paid]


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
        self._waited = _WaitingTime()
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
            self._turns[key] = self._chat_turns(tokenizer, used) if is_chat else PlainTurns(tokenizer)
        return self._turns[key]

    def _chat_turns(self, tokenizer: PreTrainedTokenizerBase, tools: ToolUse | None) -> TemplateTurns:
        turns = TemplateTurns(tokenizer, self._stop_ids, tools=tools)
        if tools and turns.incompatibility and self._say:
            self._say(
                f"{self.environment.name}: the chat template {turns.incompatibility}; they are described before the "
                f"first question, and called as {tools.sample_text}"
            )
        if turns.rewrites and self._say:
            self._say(f"{self.environment.name}: {turns.rewriting}; so each turn reads the whole conversation again")
        return turns


@dataclass(frozen=True)
class Episodes:
    """The other side of a batch of conversations; see `kedge.rollout.engine.Dialogue`.

    Args:
        environment: The environment.
        turns: For each episode, the tokens around the policy's turns.
        turns_of: Finds those of a context that the environment wrote: for a prompt, or None, and the tools' schemas.
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
    waited: _WaitingTime
    privileged: PrivilegedText | None = None
    _states: dict[int, _State] = field(default_factory=dict)

    @property
    def longest_turn(self) -> int:
        """See `Dialogue`."""
        return min(self.limits.turn_tokens or self.limits.tokens, self.limits.tokens)

    def limit(self, row: int) -> int:
        """See `Dialogue`."""
        state = self._states[row]
        limits = [self.longest_turn, state.asked and state.asked.max_tokens]
        if self.limits.context_tokens is not None:
            limits.append(self.limits.context_tokens - state.turns[-1].num_read)
        return min(limit for limit in limits if limit is not None)

    def among(self, rows: Sequence[int]) -> Episodes:
        """See `Dialogue`."""
        parts = {name: [getattr(self, name)[row] for row in rows] for name in ("turns", "prompts", "seeds")}
        return replace(self, **parts, _states={})

    def open(self, rows: Sequence[int]) -> list[list[int]]:
        """See `Dialogue`.

        Raises:
            EnvError: The environment failed, and the run should stop.
            DataError: An episode opens with more tokens than there is room for, or cannot be rendered.
        """
        for row in rows:
            known = self._states.get(row)
            self._states[row] = _State(next(_NUMBERS) if known is None else known.number)
        # Copies: an environment may change its row, which other episodes and a resumed run read again.
        starts = {row: (own_copy(self.prompts[row].row), self.seeds[row]) for row in rows}
        opened = self._call(self.environment.open, starts)
        return [self._opening(row, opened[row]) for row in rows]

    def kept(self, said: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """See `Dialogue`."""
        found: dict[int, int] = {}
        for row, tokens in said.items():
            stops = self._states[row].stops
            if any(stop in str(self.tokenizer.decode([*tokens])) for stop in stops):
                texts = (str(self.tokenizer.decode([*tokens[:count]])) for count in range(1, len(tokens)))
                places = (count for count, text in enumerate(texts, 1) if any(stop in text for stop in stops))
                found[row] = next(places, len(tokens))
        return found

    def answer(self, said: Mapping[int, Sequence[int]]) -> dict[int, Reply | None]:
        """See `Dialogue`."""
        for row, tokens in said.items():
            state = self._states[row]
            state.add(tokens)
            state.turns[-1] = replace(state.turns[-1], end=state.length - 1, num_said=len(tokens))
        texts = {row: self._said(row, tokens) for row, tokens in said.items() if not self._states[row].ending}
        turns = self._call(self.environment.step, texts)
        answers: dict[int, Reply | None] = dict.fromkeys(said)
        answers |= {row: self._after(row, said[row], turn) for row, turn in turns.items()}
        # The environment has already ended episodes with its own endings.
        self._finish(row for row, turn in turns.items() if answers[row] is None and turn.ending is None)
        return answers

    def rows(self) -> list[Mapping[str, Any] | None]:
        """Each prompt's row, with the environment's privileged information; None for an episode that failed."""
        states = [self._states[row] for row in range(len(self.prompts))]
        return [
            None if state.ending == "failed" else {**prompt.row, **state.privileged}
            for prompt, state in zip(self.prompts, states, strict=True)
        ]

    def end(self) -> None:
        """End episodes that were only opened as a test."""
        self._finish(self._states)

    def finished(self, rollout: Rollout) -> Rollout:
        """See `Dialogue`."""
        rewards = torch.zeros_like(rollout.logprobs)
        for row, state in self._states.items():
            for slot, reward in state.rewards.items():
                rewards[row, slot] = reward
            if state.ending == "failed":
                rewards[row] = math.nan
        device = rewards.device
        states = [self._states[row] for row in range(len(self.prompts))]
        endings = [ENDINGS.index(state.ending) for state in states]
        if self.privileged is not None:
            rollout = self.privileged.added(rollout, self.rows(), self.tokenizer)
        return replace(
            rollout,
            rewards=rewards,
            ending=torch.tensor(endings, device=device),
            cut_off=torch.tensor([ENDINGS[ending] in CUT_OFF for ending in endings], device=device),
            calls=torch.tensor([[state.calls, state.errors, state.changed] for state in states], device=device),
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
        numbers = {self._states[row].number: row for row in rows}
        started = time.perf_counter()
        found = method({number: rows[row] for number, row in numbers.items()})
        self.waited.seconds += time.perf_counter() - started
        return {row: found[number] for number, row in numbers.items()}

    def _fail(self, row: int) -> None:
        """Record that the environment failed in an episode, which ends with the policy's turn."""
        if self.limits.on_error == "stop":
            raise EnvError(self.environment.failure)
        self._states[row].ending = "failed"

    def _opening(self, row: int, opened: Answer | None) -> list[int]:
        """Return the tokens that an episode opens with; one that failed is left after the policy's turn."""
        state = self._states[row]
        turns = self.turns[row]
        if opened is None:
            self._fail(row)
        elif opened.context is not None:
            turns = self.turns_of(None, opened.tools)
        try:
            conversation, tokens = self._opening_tokens(row, turns, opened)
        except DataError as error:
            if opened is None or opened.context is None:
                raise
            # An agent writes its first request as it plays, so a bad one is a failure of its episode.
            self._finish([row])
            self.environment.failure = str(error)
            return self._opening(row, None)
        if opened is not None:
            state.privileged = opened.privileged
            state.asked = opened
            state.is_agents = opened.context is not None
        state.opens(tokens)
        self._begins(row, tokens, len(tokens), conversation)
        return tokens

    def _opening_tokens(self, row: int, turns: Turns, opened: Answer | None) -> tuple[Messages, list[int]]:
        """Return an opening as messages and as tokens.

        Raises:
            DataError: It cannot be rendered, or there is no room for it.
        """
        name = self.environment.name
        try:
            if opened is None or opened.context is None:
                follows: Messages = [{"role": "user", "content": "…"}] if opened is None else opened.messages
                conversation = turns.opening(self.prompts[row], follows)
            else:
                conversation = opened.context
            tokens = turns.context(_shown(conversation))
        except RowError as error:
            raise DataError(f"{name} cannot open an episode: {error}") from error
        most = self.limits.prompt_tokens
        if not tokens or (most is not None and len(tokens) > most):
            raise DataError(
                f"an episode of {name} opens with {len(tokens)} tokens (prompt, tools and what reset says); expected 1 "
                f"to {most}: the model's context less rollout.max_new_tokens, or, where it is shorter, less "
                "environment.max_turn_tokens"
            )
        return conversation, tokens

    def _said(self, row: int, tokens: Sequence[int]) -> Said:
        """Describe a turn, without its final stop token, unless that may be the tag that closes a call."""
        state = self._states[row]
        ids = list(tokens)
        stops = bool(ids) and ids[-1] in self.stop_ids
        closes = self._has_tools(state) and str(self.tokenizer.decode(ids[-1:])).startswith("</")
        text = str(self.tokenizer.decode(ids[:-1] if stops and not closes else ids))
        ends = [place for stop in state.stops if (place := text.find(stop)) >= 0]
        return {
            "text": state.opening + text[: min(ends, default=None)],
            "num_tokens": len(tokens),
            "num_read": state.turns[-1].num_read,
            "is_complete": stops or bool(ends),
        }

    def _has_tools(self, state: _State) -> bool:
        """True if the policy may call tools in the turn that is under way."""
        return bool(self.environment.tools or (state.asked and state.asked.tools))

    def _begins(self, row: int, tokens: Sequence[int], num_read: int, read: Messages | None) -> None:
        """Begin a turn of the policy; a thought may have been opened for it.

        Args:
            row: The episode.
            tokens: The tokens that it reads, at least the last ones.
            num_read: Their number.
            read: The conversation in messages, if it is needed.
        """
        state = self._states[row]
        state.turns.append(_Turn(num_read, read))
        state.opening = ""
        if self._has_tools(state):
            state.opening = opened_thought(str(self.tokenizer.decode([*tokens[-LONGEST_MARK:]])))

    def _after(self, row: int, said: Sequence[int], turn: Answer) -> Reply | None:
        """Return what the policy reads after a turn; None if the episode has ended."""
        state = self._states[row]
        self._pay(row, turn)
        state.calls += turn.num_calls
        state.errors += turn.num_errors
        state.changed += turn.num_changed
        if turn.ending == "failed":
            self._fail(row)
        has_room = state.length < self.limits.tokens or said[-1] in self.stop_ids
        # With tools, an answer without a call ends an episode, unless it was cut off at the token limit.
        if turn.ending is not None and (has_room or turn.ending != "completed" or not self.environment.tools):
            state.ending = turn.ending
            return None
        if state.length >= self.limits.tokens:
            state.ending = "max_tokens"
            return None
        if len(state.turns) >= self.limits.turns:
            state.ending = "max_turns"
            return None
        last = state.turns[-1]
        try:
            turns = self.turns_of(None, turn.tools) if state.is_agents else self.turns[row]
            if (read := turn.context) is None and turns.rewrites:
                assert last.read is not None
                answer = {"role": "assistant", "content": self._said(row, said)["text"]}
                read = [*last.read, answer, *turn.messages]
            if read is None:
                reply = Reply(tokens := turns.after(said, turn.messages))
                num_read = last.num_read + len(said) + len(tokens)
            else:
                tokens, num_read, reply = self._new_context(state, turns, read)
        except RowError as error:
            fault = f"an answer of {self.environment.name} cannot be written as a message: {error}"
            if turn.context is None:
                raise DataError(fault) from error
            self.environment.failure = fault
            self._fail(row)
            return None
        longest = math.inf if self.limits.context_tokens is None else self.limits.context_tokens
        if state.length + len(reply.tokens) >= self.limits.tokens or num_read >= longest:
            state.ending = "context_overflow"
            return None
        state.add(reply.tokens, reply.parent)
        state.asked = turn
        self._begins(row, tokens, num_read, read)
        return reply

    def _new_context(self, state: _State, turns: Turns, read: Messages) -> tuple[Sequence[int], int, Reply]:
        """Return the last tokens of a context or all of them, their number in all, and those new to the episode.

        A conversation that continues after a turn of the policy keeps the tokens sampled then.
        """
        place = next((place for place in range(len(read) - 1, -1, -1) if read[place]["role"] == "assistant"), -1)
        number = read[place].get("answer") if place >= 0 else None
        if number is not None and not turns.rewrites and place + 1 < len(read):
            before = state.turns[int(number)]
            if before.read == read[:place]:
                tokens = turns.after([state.tokens[before.end]], read[place + 1 :])
                parent = None if before.end == state.length - 1 else before.end
                return tokens, before.num_read + before.num_said + len(tokens), Reply(tokens, parent)
        ids = turns.context(_shown(read))
        count, slot = state.known(ids)
        return ids, len(ids), Reply(ids[count:], None if slot == state.length - 1 else slot)

    def _pay(self, row: int, turn: Answer) -> None:
        """Add a reward at the policy's last token so far, and those of single turns at their last tokens."""
        state = self._states[row]
        paid = [(state.length - 1, turn.reward)]
        paid += [(each.end, reward) for each, reward in zip(state.turns, turn.rewards, strict=bool(turn.rewards))]
        for slot, reward in paid:
            state.rewards[slot] = state.rewards.get(slot, 0.0) + reward


def _shown(conversation: Messages) -> Messages:
    """The messages as a chat template gets them."""
    return [{key: value for key, value in message.items() if key != "answer"} for message in conversation]
